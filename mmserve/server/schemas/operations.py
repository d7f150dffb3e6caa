"""What `/docs` says of routes that read their bodies by hand."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from mmserve.pipelines.tasks import TaskName
from mmserve.server.schemas.common import EVENT_STREAM, error_responses
from mmserve.server.schemas.files import FileForm
from mmserve.server.schemas.jobs import JobForm, JobRequest
from mmserve.server.schemas.results import AnswerResult, ExtractionResult, ResultList, SummaryResult, TranscriptResult
from mmserve.server.schemas.tasks import SCHEMAS

REFERENCE = "#/components/schemas/{model}"
_FILE = {"type": "string", "format": "binary", "description": "The document."}
_FILES = {
    "type": "array",
    "items": {"type": "string", "format": "binary"},
    "minItems": 1,
    "description": "The documents; `files` is accepted as a name, too.",
}
_EXAMPLE_FILE = {"file_data": "SW52b2ljZSA0MjogMTAgRVVSLg==", "filename": "invoice.txt"}
_EXAMPLE_BODIES: Mapping[TaskName, dict[str, Any]] = {
    "summarize": {**_EXAMPLE_FILE, "length": "short"},
    "ask": {**_EXAMPLE_FILE, "question": "What is the total?"},
    "extract": {**_EXAMPLE_FILE, "fields": "vendor,date,total"},
    "transcribe": {**_EXAMPLE_FILE, "pages": "1-2"},
}
_ANSWERS = """

One file gives its result, or its error. Several give `{"object": "list", "data": [...]}` in their order, where a file
that failed has an `error` in its place. `stream=true` gives server-sent events instead: `progress`, `delta`, `result`,
`error`, each with the file's `index` and `name`, and `done` at the end.

An answer that the owner of the file has had before, for the same bytes, options and model, comes from the cache and
says so (`cached`); `no_cache=true` asks again. With a `temperature` and without a `seed` nothing is cached.
"""
_RESULTS: Mapping[TaskName, Any] = {
    "summarize": SummaryResult | ResultList[SummaryResult],
    "ask": AnswerResult | ResultList[AnswerResult],
    "extract": ExtractionResult | ResultList[ExtractionResult],
    "transcribe": TranscriptResult | ResultList[TranscriptResult],
}
_DESCRIPTIONS: Mapping[TaskName, str] = {
    "summarize": "Summarises documents, with page citations. Every sentence was found on the pages that it names.",
    "ask": "Answers a question from each document, with page citations, or says that the document does not answer it.",
    "extract": "Reads the values that a JSON Schema asks for. Each comes with the page that it was read on.",
    "transcribe": "Writes each document down as Markdown, page by page, with its tables.",
}
TASK_ERRORS = error_responses(400, 404, 408, 413, 415, 422, 429, 500, 503, 504, 507)


def task_operation(task: TaskName) -> dict[str, Any]:
    """Arguments for the route of a task."""
    return {
        "summary": task.capitalize(),
        "description": _DESCRIPTIONS[task] + _ANSWERS,
        "responses": {
            200: {"model": _RESULTS[task], "content": {**EVENT_STREAM}, "description": "The result, or several."},
            **TASK_ERRORS,
        },
        "openapi_extra": {"requestBody": {"required": True, "content": _bodies(task)}},
    }


def _bodies(task: TaskName) -> dict[str, Any]:
    schema = SCHEMAS[task]
    return {
        "multipart/form-data": {"schema": form_schema(schema.form, {"file": _FILES}, required=["file"])},
        "application/json": {
            "schema": {"$ref": REFERENCE.format(model=schema.body.__name__)},
            "example": _EXAMPLE_BODIES[task],
        },
    }


def form_schema(fields: type[BaseModel], files: Mapping[str, Any], *, required: list[str]) -> dict[str, Any]:
    """A form's schema: files beside a model's fields, all of which are plain."""
    own = fields.model_json_schema(by_alias=True)
    return {
        "type": "object",
        "properties": {**files, **{name: _without_null(field) for name, field in own["properties"].items()}},
        "required": [*required, *own.get("required", [])],
    }


def _without_null(field: dict[str, Any]) -> dict[str, Any]:
    """A form cannot say null: it leaves the field out."""
    kinds = [kind for kind in field.get("anyOf", ()) if kind != {"type": "null"}]
    if len(kinds) != 1:
        return {**field, "anyOf": kinds} if kinds else field
    return {**kinds[0], **{name: value for name, value in field.items() if name != "anyOf"}}


def file_body() -> dict[str, Any]:
    return {"multipart/form-data": {"schema": form_schema(FileForm, {"file": _FILE}, required=["file"])}}


def job_bodies() -> dict[str, Any]:
    """A form for a job has the fields of the task's own form on top; their names do not contradict."""
    form = form_schema(JobForm, {"file": _FILES}, required=["file"])
    for schema in SCHEMAS.values():
        form["properties"] = {**form_schema(schema.form, {}, required=[])["properties"], **form["properties"]}
    del form["properties"]["stream"]
    return {
        "application/json": {"schema": {"$ref": REFERENCE.format(model=JobRequest.__name__)}},
        "multipart/form-data": {"schema": form},
    }


BODY_MODELS: tuple[type[BaseModel], ...] = (*(schema.body for schema in SCHEMAS.values()), JobRequest)
