"""`POST /v1/summarize` and its sisters: documents in, results with pages out."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Depends, Request, Response
from starlette.responses import JSONResponse

from mmserve.errors import MMServeError
from mmserve.pipelines.concurrency import end_all
from mmserve.pipelines.events import Event, stream_data
from mmserve.pipelines.tasks import TASKS, TaskName
from mmserve.server.documents import SentDocument, SentTask, brought, receive_task
from mmserve.server.errors import as_mmserve_error, envelope
from mmserve.server.lifetime import run_within_lifetime
from mmserve.server.schemas.operations import task_operation
from mmserve.server.schemas.tasks import SCHEMAS
from mmserve.server.sse import EventStream, frame, with_heartbeats
from mmserve.server.state import Owner, ServerState, State, require_ready
from mmserve.server.work import TaskRun

router = APIRouter(tags=["documents"], dependencies=[Depends(require_ready)])


@dataclass(frozen=True)
class TaskCall:
    """One request on its way."""

    run: TaskRun
    sent: SentTask

    @property
    def state(self) -> ServerState:
        return self.run.place

    @property
    def is_single(self) -> bool:
        return len(self.sent.documents) == 1

    async def result(self, document: SentDocument) -> dict[str, Any]:
        name, path = await brought(document, self.sent.folder, self.state, self.run.owner)
        return await self.run.result(path, name, is_stored=document.is_stored)


def _add_route(task: TaskName) -> None:
    async def create(request: Request, state: State, owner: Owner) -> Response:
        return await _answer(task, request, state, owner)

    router.add_api_route(f"/v1/{task}", create, methods=["POST"], name=f"create_{task}", **task_operation(task))


async def _answer(task: TaskName, request: Request, state: ServerState, owner: str) -> Response:
    sent = await receive_task(request, SCHEMAS[task], state)
    with ExitStack() as cleanup:
        cleanup.callback(sent.discard)
        fields = sent.fields
        state.model_name(fields.model)
        # A schema takes a while to check.
        options = await asyncio.to_thread(fields.to_options)
        call = TaskCall(TaskRun(state, state.jobs.results, owner, task, options, fields.no_cache), sent)
        timeout = state.settings.request_timeout
        if fields.stream:
            on_end = cleanup.pop_all().close
            frames = with_heartbeats(_frames(call))
            return EventStream(frames, drain=state.drain, timeout=timeout, error_event="error", on_end=on_end)
        content = await run_within_lifetime(_results(call), receive=request.receive, drain=state.drain, timeout=timeout)
    return JSONResponse(content)


async def _results(call: TaskCall) -> dict[str, Any]:
    documents = call.sent.documents
    with call.state.document_gate.admit(len(documents), call.run.owner):
        if call.is_single:
            return await call.result(documents[0])
        return {"object": "list", "data": await asyncio.gather(*(_result_or_error(call, one) for one in documents))}


async def _result_or_error(call: TaskCall, document: SentDocument) -> dict[str, Any]:
    try:
        return await call.result(document)
    except Exception as error:
        return {"name": document.name, **envelope(as_mmserve_error(error))}


@dataclass(frozen=True)
class _Failure:
    error: MMServeError
    text: str


_Queue = asyncio.Queue[str | _Failure | None]


async def _frames(call: TaskCall) -> AsyncGenerator[str, None]:
    """Frames of all files, interleaved. A file that came alone and fails at once is an ordinary error."""
    queue: _Queue = asyncio.Queue()
    num_open = len(call.sent.documents)
    with call.state.document_gate.admit(num_open, call.run.owner):
        tasks = [asyncio.create_task(_work_off(call, index, queue)) for index in range(num_open)]
        try:
            is_first = True
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
            await end_all(tasks)
    yield frame({"type": "done"}, event="done")


async def _work_off(call: TaskCall, index: int, queue: _Queue) -> None:
    document = call.sent.documents[index]
    name = document.name

    def framed(kind: str, data: dict[str, Any]) -> str:
        return frame({"type": kind, "index": index, "name": name, **data}, event=kind)

    def tell(event: Event) -> None:
        if (told := stream_data(event)) is not None:
            queue.put_nowait(framed(*told))

    try:
        name, path = await brought(document, call.sent.folder, call.state, call.run.owner)
        result = await call.run.result(path, name, tell, is_stored=document.is_stored)
        queue.put_nowait(framed("result", {"result": result}))
    except Exception as error:
        known = as_mmserve_error(error)
        queue.put_nowait(_Failure(known, framed("error", envelope(known))))
    finally:
        queue.put_nowait(None)


for _task in TASKS:
    _add_route(_task)
