"""`/v1/summarize`, `/v1/ask`, `/v1/extract`, `/v1/transcribe`: the fields of a form, and the body in JSON."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pydantic import Field, field_validator

from mmserve.errors import RequestError
from mmserve.pipelines.page_views import Mode
from mmserve.pipelines.prompts import Length
from mmserve.pipelines.task_options import TaskOptions
from mmserve.pipelines.tasks import TASKS, TaskName
from mmserve.server.schemas.common import RequestModel


class TaskFields(RequestModel):
    """What may be asked of every task; all of it is optional. Subclasses are the fields of a form beside the files."""

    task: ClassVar[TaskName]

    model: str | None = Field(None, description="A served name (see /v1/models); the first one if absent.")
    stream: bool = Field(False, description="Send progress, text and results as server-sent events.")
    no_cache: bool = Field(False, description="Ask the model again even if the answer is known.")
    pages: str | None = Field(None, description="Which pages, as 1-4,7,10- (from 1).", examples=["1-4,7,10-"])
    max_tokens: int | None = Field(None, description="Longest answer in tokens.")
    temperature: float | None = Field(None, description="0, the default, is the same answer every time.")
    seed: int | None = Field(None, description="Makes an answer with a temperature repeatable.")
    mode: Mode | None = Field(
        None, description="What the model gets: pages as pictures (vision), as text, or the best that it takes (auto)."
    )
    max_pixels: int | None = Field(None, description="Scale each page's picture down to this many pixels.")
    min_pixels: int | None = Field(None, description="Scale each page's picture up to this many pixels.")

    @classmethod
    def parse_form(cls, fields: Mapping[str, str]) -> Self:
        """An empty field is one that was left out, as browsers send it. Raises `RequestError`."""
        return cls.parse({name: value for name, value in fields.items() if value.strip()})

    def values(self) -> dict[str, Any]:
        """The task's options by name, those that were given, as JSON has them."""
        known = TASKS[self.task].options_type.__dataclass_fields__
        given = self.model_dump(by_alias=True, exclude_none=True)
        return {name: value for name, value in given.items() if name in known}

    def to_options(self) -> TaskOptions:
        """Raises `RequestError` naming the option at fault."""
        return TASKS[self.task].options(self.values())


class SummarizeFields(TaskFields):
    task = "summarize"

    prompt: str | None = Field(None, description="What the summary should pay attention to.", examples=["Dates."])
    length: Length | None = Field(None, description="How long the summary should be; medium if absent.")
    language: str | None = Field(None, description="The language to answer in, by name; the document's own if absent.")


class AskFields(TaskFields):
    task = "ask"

    question: str = Field(description="What to look for in the document.", examples=["When is the total due?"])
    language: str | None = Field(None, description="The language to answer in, by name; the document's own if absent.")


class ExtractFields(TaskFields):
    task = "extract"

    json_schema: dict[str, Any] | str | None = Field(
        None, alias="schema", description="A JSON Schema of the object wanted; in a form, its text."
    )
    fields: str | None = Field(
        None, description="The short form of a schema: names of fields.", examples=["vendor,date,total"]
    )

    @field_validator("json_schema")
    @classmethod
    def _read_schema(cls, given: dict[str, Any] | str | None) -> dict[str, Any] | None:
        if not isinstance(given, str):
            return given
        try:
            read = json.loads(given)
        except (ValueError, RecursionError):
            raise ValueError("it is no JSON") from None
        if not isinstance(read, dict):
            raise ValueError("a JSON Schema is an object here")
        return read


class TranscribeFields(TaskFields):
    task = "transcribe"


class DocumentSource(RequestModel):
    """Where a document is: in the request, among the stored files, or at a URL. One of the three."""

    file_data: str | None = Field(
        None, description="The file's bytes in base64, or as a data: URL.", examples=["SW52b2ljZSA0MjogMTAgRVVSLg=="]
    )
    file_id: str | None = Field(None, description="A file that was stored by POST /v1/files.")
    url: str | None = Field(None, description="Where to fetch it; only hosts that the operator allows.")
    filename: str | None = Field(None, description="What to call it in the answer.", examples=["invoice.txt"])

    @property
    def num_given(self) -> int:
        return sum(place is not None for place in (self.file_data, self.file_id, self.url))


class DocumentsBody(DocumentSource):
    """One document, or several in `files`."""

    files: list[DocumentSource] | None = Field(None, description="Several documents; the answer is then a list.")

    def sources(self, most: int) -> list[DocumentSource]:
        """Raises `RequestError` unless there is at least one document and each is in exactly one place."""
        own = DocumentSource(file_data=self.file_data, file_id=self.file_id, url=self.url, filename=self.filename)
        if self.files is None:
            return [_checked(own, "")]
        if own.num_given:
            raise RequestError("invalid_request", "Send one document, or several in files, not both.", param="files")
        if not self.files:
            raise RequestError("invalid_request", "files is empty: send at least one document.", param="files")
        if len(self.files) > most:
            raise RequestError(
                "invalid_request", f"files has {len(self.files)} documents; at most {most} are taken.", param="files"
            )
        return [_checked(source, f"files[{index}]") for index, source in enumerate(self.files)]


def _checked(source: DocumentSource, where: str) -> DocumentSource:
    if source.num_given == 1:
        return source
    subject = f"{where} has" if where else "The body has"
    found = "no document" if source.num_given == 0 else "one document in several places"
    raise RequestError(
        "invalid_request", f"{subject} {found}: give file_data, file_id or url.", param=where or "file_data"
    )


class SummarizeBody(DocumentsBody, SummarizeFields):
    """The same in JSON, with the documents."""


class AskBody(DocumentsBody, AskFields):
    """The same in JSON, with the documents."""


class ExtractBody(DocumentsBody, ExtractFields):
    """The same in JSON, with the documents."""


class TranscribeBody(DocumentsBody, TranscribeFields):
    """The same in JSON, with the documents."""


@dataclass(frozen=True)
class TaskSchema:
    """What a task is sent: the fields of its form, and the body in JSON."""

    form: type[TaskFields]
    body: type[TaskFields]


SCHEMAS: Mapping[TaskName, TaskSchema] = {
    "summarize": TaskSchema(SummarizeFields, SummarizeBody),
    "ask": TaskSchema(AskFields, AskBody),
    "extract": TaskSchema(ExtractFields, ExtractBody),
    "transcribe": TaskSchema(TranscribeFields, TranscribeBody),
}
