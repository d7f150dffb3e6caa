"""`POST /v1/summarize`: documents in, summaries with page citations out."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Depends, Request, Response
from pydantic import Field, ValidationError
from starlette.responses import JSONResponse

from mmserve.errors import MMServeError
from mmserve.pipelines.events import Done, Event, OnEvent, TextAdded
from mmserve.pipelines.page_views import Mode
from mmserve.pipelines.prompts import Length
from mmserve.pipelines.summarize import SummarizeOptions, summarize
from mmserve.pipelines.summary import Summary
from mmserve.server.errors import as_mmserve_error, envelope, from_validation
from mmserve.server.lifetime import run_within_lifetime
from mmserve.server.schemas.common import ERROR_RESPONSES, RequestModel
from mmserve.server.sse import EventStream, frame
from mmserve.server.state import ServerState, State, require_ready
from mmserve.server.uploads import Upload, receive_form

router = APIRouter(tags=["documents"], dependencies=[Depends(require_ready)])

DOCUMENT_ERRORS: dict[int | str, dict[str, Any]] = {
    **ERROR_RESPONSES,
    422: {**ERROR_RESPONSES[400], "description": "The document is damaged, empty or protected by a password."},
}


class SummarizeForm(RequestModel):
    """The form's fields beside the files; all are optional."""

    model: str | None = Field(None, description="A served name (see /v1/models); the first one if absent.")
    stream: bool = Field(False, description="Send progress, text and results as server-sent events.")
    pages: str | None = Field(None, description="Which pages, as 1-4,7,10- (from 1).")
    prompt: str | None = Field(None, description="What the summary should pay attention to.")
    length: Length | None = Field(None, description="How long the summary should be; medium if absent.")
    language: str | None = Field(None, description="The language to answer in, by name; the document's own if absent.")
    max_tokens: int | None = Field(None, description="Longest answer in tokens.")
    temperature: float | None = Field(None, description="0, the default, is the same answer every time.")
    seed: int | None = None
    mode: Mode | None = Field(
        None, description="What the model gets: pages as pictures (vision), as text, or the best that it takes (auto)."
    )
    max_pixels: int | None = Field(None, description="Scale each page's picture down to this many pixels.")
    min_pixels: int | None = Field(None, description="Scale each page's picture up to this many pixels.")

    @classmethod
    def parse(cls, fields: dict[str, str]) -> "SummarizeForm":
        """An empty field is one that was left out, as browsers send it. Raises `RequestError`."""
        try:
            return cls.model_validate({name: value for name, value in fields.items() if value.strip()})
        except ValidationError as error:
            raise from_validation(error.errors()) from None

    def to_options(self) -> SummarizeOptions:
        return SummarizeOptions(**self.model_dump(exclude={"model", "stream"}, exclude_none=True))


def _multipart_body() -> dict[str, Any]:
    fields = SummarizeForm.model_json_schema()["properties"]
    files = {"type": "array", "items": {"type": "string", "format": "binary"}, "description": "The documents."}
    schema = {"type": "object", "required": ["file"], "properties": {"file": files, **fields}}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


@dataclass(frozen=True)
class SummarizeCall:
    """One upload on its way."""

    state: ServerState
    uploads: tuple[Upload, ...]
    options: SummarizeOptions

    @property
    def is_single(self) -> bool:
        return len(self.uploads) == 1

    async def summary(self, upload: Upload, on_event: OnEvent | None = None) -> Summary:
        async with self.state.document_slots:
            return await summarize(
                upload.path,
                name=upload.name,
                engine=self.state.engine,
                prompts=self.state.prompts,
                reader=self.state.reader,
                options=self.options,
                on_event=on_event,
            )


@router.post("/v1/summarize", responses=DOCUMENT_ERRORS, openapi_extra=_multipart_body())
async def create_summary(request: Request, state: State) -> Response:
    """Summarises each file sent in a field `file` (repeatable; `files` is accepted too), with page citations.

    One file gives its result, or its error. Several give `{"object": "list", "data": [...]}` in their order, where a
    file that failed has an `error` in its place. `stream=true` gives server-sent events instead: `progress`, `delta`,
    `result`, `error`, each with the file's `index` and `name`, and `done` at the end.
    """
    form = await receive_form(request, max_files=state.settings.max_files, parent=state.settings.upload_dir)
    with ExitStack() as cleanup:
        cleanup.callback(form.discard)
        fields = SummarizeForm.parse(form.options)
        state.model_name(fields.model)
        call = SummarizeCall(state, form.uploads, fields.to_options())
        timeout = state.settings.request_timeout
        if fields.stream:
            on_end = cleanup.pop_all().close
            return EventStream(_frames(call), drain=state.drain, timeout=timeout, error_event="error", on_end=on_end)
        content = await run_within_lifetime(_results(call), receive=request.receive, drain=state.drain, timeout=timeout)
    return JSONResponse(content)


async def _results(call: SummarizeCall) -> dict[str, Any]:
    with call.state.gate.admit(len(call.uploads)):
        if call.is_single:
            return (await call.summary(call.uploads[0])).to_dict()
        return {"object": "list", "data": await asyncio.gather(*(_result_or_error(call, u) for u in call.uploads))}


async def _result_or_error(call: SummarizeCall, upload: Upload) -> dict[str, Any]:
    try:
        return (await call.summary(upload)).to_dict()
    except Exception as error:
        return {"name": upload.name, **envelope(as_mmserve_error(error))}


@dataclass(frozen=True)
class _Failure:
    error: MMServeError
    text: str


async def _frames(call: SummarizeCall) -> AsyncGenerator[str, None]:
    """Frames of all files, interleaved. A file that came alone and fails at once is an ordinary error."""
    queue: asyncio.Queue[str | _Failure | None] = asyncio.Queue()
    with call.state.gate.admit(len(call.uploads)):
        tasks = [asyncio.create_task(_work_off(call, index, queue)) for index in range(len(call.uploads))]
        try:
            is_first, num_open = True, len(tasks)
            while num_open:
                item = await queue.get()
                if item is None:
                    num_open -= 1
                    continue
                if isinstance(item, _Failure) and is_first and call.is_single:
                    raise item.error
                is_first = False
                yield item.text if isinstance(item, _Failure) else item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    yield frame({"type": "done"}, event="done")


async def _work_off(call: SummarizeCall, index: int, queue: "asyncio.Queue[str | _Failure | None]") -> None:
    upload = call.uploads[index]

    def framed(kind: str, data: dict[str, Any]) -> str:
        return frame({"type": kind, "index": index, "name": upload.name, **data}, event=kind)

    def tell(event: Event) -> None:
        if isinstance(event, TextAdded):
            queue.put_nowait(framed("delta", event.to_dict()))
        elif not isinstance(event, Done):
            queue.put_nowait(framed("progress", {"event": event.kind, **event.to_dict()}))

    try:
        summary = await call.summary(upload, tell)
        queue.put_nowait(framed("result", {"result": summary.to_dict()}))
    except Exception as error:
        known = as_mmserve_error(error)
        queue.put_nowait(_Failure(known, framed("error", envelope(known))))
    finally:
        queue.put_nowait(None)
