"""What `/docs` says of routes that read their bodies by hand."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from mmserve.pipelines.tasks import TaskName
from mmserve.server.schemas.common import error_responses
from mmserve.server.schemas.jobs import JobForm, JobRequest
from mmserve.server.schemas.results import ResultList, SummaryResult
from mmserve.server.schemas.tasks import SCHEMAS

REFERENCE = "#/components/schemas/{model}"
EVENT_STREAM: Mapping[str, Any] = {"text/event-stream": {"schema": {"type": "string"}}}
_FILES = {
    "type": "array",
    "items": {"type": "string", "format": "binary"},
    "minItems": 1,
    "description": "The documents; `files` is accepted as a name, too.",
}
_EXAMPLE_BODIES: Mapping[TaskName, dict[str, Any]] = {
    "summarize": {"file_data": "SW52b2ljZSA0MjogMTAgRVVSLg==", "filename": "invoice.txt", "length": "short"},
}
_ANSWERS = """

One file gives its result, or its error. Several give `{"object": "list", "data": [...]}` in their order, where a file
that failed has an `error` in its place. `stream=true` gives server-sent events instead: `progress`, `delta`, `result`,
`error`, each with the file's `index` and `name`, and `done` at the end.

An answer that the owner of the file has had before, for the same bytes, options and model, comes from the cache and
says so (`cached`); `no_cache=true` asks again. With a `temperature` and without a `seed` nothing is cached.
"""
_RESULTS: Mapping[TaskName, Any] = {"summarize": SummaryResult | ResultList[SummaryResult]}
_DESCRIPTIONS: Mapping[TaskName, str] = {
    "summarize": "Summarises documents, with page citations. Every sentence was found on the pages that it names.",
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
        "properties": {**files, **own["properties"]},
        "required": [*required, *own.get("required", [])],
    }


def job_bodies() -> dict[str, Any]:
    """A form for a job has the fields of the task's own form on top; their names do not contradict."""
    form = form_schema(JobForm, {"file": _FILES}, required=["file"])
    for schema in SCHEMAS.values():
        form["properties"] = {**schema.form.model_json_schema(by_alias=True)["properties"], **form["properties"]}
    del form["properties"]["stream"]
    return {
        "application/json": {"schema": {"$ref": REFERENCE.format(model=JobRequest.__name__)}},
        "multipart/form-data": {"schema": form},
    }


BODY_MODELS: tuple[type[BaseModel], ...] = (*(schema.body for schema in SCHEMAS.values()), JobRequest)
