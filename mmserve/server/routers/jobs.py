"""`/v1/jobs`: tasks that outlive their request, and the server's end."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from starlette.responses import JSONResponse

from mmserve.errors import RequestError
from mmserve.jobs.digests import digest_of
from mmserve.jobs.records import Job, JobStatus
from mmserve.pipelines.batch import file_digest
from mmserve.pipelines.tasks import TaskName
from mmserve.server.json_body import read_json_object
from mmserve.server.routers.files import After, Limit, keep
from mmserve.server.schemas.common import EVENT_STREAM, STORAGE_STATUSES, error_responses
from mmserve.server.schemas.jobs import DeletedJob, JobForm, JobList, JobObject, JobRequest
from mmserve.server.schemas.operations import job_bodies
from mmserve.server.schemas.tasks import SCHEMAS, TaskFields
from mmserve.server.sse import HEARTBEAT_FRAME, EventStream, frame, with_heartbeats
from mmserve.server.state import Owner, ServerState, State, require_running
from mmserve.server.uploads import Upload, is_multipart, receive_form

router = APIRouter(tags=["jobs"])

# What the database's numbers go up to.
MAX_EVENT = 2**31 - 1
_JOB_ERRORS = error_responses(400, 404, 408, 409, 413, 415, 429, *STORAGE_STATUSES, 504, 507)
IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=255,
        description="A word of your own for this request: sent again while the job is kept, it gives the same job.",
    ),
]
LastEventID = Annotated[
    int | None,
    Header(ge=0, le=MAX_EVENT, alias="Last-Event-ID", description="The `id` of the last event that arrived."),
]


@dataclass(frozen=True)
class JobOrder:
    """What a request for a job says, whatever its form: files that are stored, or uploads that are to be."""

    fields: TaskFields
    webhook_url: str | None
    file_ids: tuple[str, ...] = ()
    uploads: tuple[Upload, ...] = ()

    async def digest(self) -> str:
        """Equal for equal requests; of uploads their names and bytes count."""
        uploads = [[upload.name, await asyncio.to_thread(file_digest, upload.path)] for upload in self.uploads]
        return digest_of(self.fields.task, self.fields.model_dump(), self.webhook_url, self.file_ids, uploads)


@router.post(
    "/v1/jobs",
    status_code=202,
    response_model=JobObject,
    responses={200: {"model": JobObject, "description": "The job that this idempotency key has."}, **_JOB_ERRORS},
    openapi_extra={"requestBody": {"required": True, "content": job_bodies()}},
    dependencies=[Depends(require_running)],
)
async def create_job(request: Request, state: State, owner: Owner, idempotency_key: IdempotencyKey = None) -> Response:
    """Starts a task over files that are stored, or that come in a field `file` (repeatable) and are stored then.

    The job goes on when the connection ends, and after a restart of the server. A file that cannot be read is an
    `error` in its place; the others are done. With an `Idempotency-Key` a request can be sent again: the answer is the
    same job (200), or 409 if the request is another one.
    """
    async with AsyncExitStack() as cleanup:
        order = await _receive(request, state, cleanup)
        state.model_name(order.fields.model)
        job, is_new = await _create(state, owner, order, idempotency_key)
    return JSONResponse(job.to_dict(), status_code=202 if is_new else 200)


@router.get("/v1/jobs", response_model=JobList, responses=error_responses(400, *STORAGE_STATUSES))
async def list_jobs(
    state: State,
    owner: Owner,
    limit: Limit = 20,
    after: After = None,
    status: Annotated[JobStatus | None, Query(description="Only jobs of this status.")] = None,
) -> dict[str, Any]:
    """Your jobs without their results, the newest first."""
    jobs, has_more = await state.jobs.jobs.list(owner, limit=limit, after=after, status=status)
    return {"object": "list", "data": [job.to_dict() for job in jobs], "has_more": has_more}


@router.get("/v1/jobs/{job_id}", response_model=JobObject, responses=error_responses(404, *STORAGE_STATUSES))
async def retrieve_job(job_id: str, state: State, owner: Owner) -> dict[str, Any]:
    """A job with its results. They can be read as often as you like until it expires."""
    return (await state.jobs.jobs.get(owner, job_id)).to_dict()


@router.delete(
    "/v1/jobs/{job_id}", response_model=JobObject | DeletedJob, responses=error_responses(404, *STORAGE_STATUSES)
)
async def delete_job(job_id: str, state: State, owner: Owner) -> dict[str, Any]:
    """Cancels a job that is queued or running, which ends the engine's work; removes one that has ended."""
    if (await state.jobs.jobs.get(owner, job_id)).has_ended:
        await state.jobs.jobs.remove(owner, job_id)
        return DeletedJob(id=job_id).model_dump()
    return (await state.jobs.jobs.cancel(owner, job_id)).to_dict()


@router.get(
    "/v1/jobs/{job_id}/events",
    response_class=Response,
    responses={
        200: {"description": "Events.", "content": {**EVENT_STREAM}},
        **error_responses(400, 404, *STORAGE_STATUSES),
    },
)
async def follow_job(
    job_id: str,
    state: State,
    owner: Owner,
    last_event_id: LastEventID = None,
    after: Annotated[
        int | None, Query(ge=0, le=MAX_EVENT, description="As Last-Event-ID, which goes before it.")
    ] = None,
) -> Response:
    """A job's server-sent events, from the first or from where you were: `progress`, `delta`, `result`, `error`.

    `done` with the job's `status` is the last. The stream also ends when the server does; follow again then.
    """
    await state.jobs.jobs.get(owner, job_id)
    start = last_event_id if last_event_id is not None else after or 0
    frames = with_heartbeats(_frames(state, owner, job_id, start), until=state.drain.begun)
    return EventStream(frames, drain=state.drain, timeout=None, error_event="error")


async def _frames(state: ServerState, owner: str, job_id: str, after: int) -> AsyncGenerator[str, None]:
    # The client shall know at once that the job is there, however long nothing happens.
    yield HEARTBEAT_FRAME
    async with aclosing(state.jobs.jobs.events(owner, job_id, after)) as events:
        async for event in events:
            yield frame({"type": event.event, **event.data}, event=event.event, number=event.number)


async def _receive(request: Request, state: ServerState, cleanup: AsyncExitStack) -> JobOrder:
    """Uploads are removed with `cleanup`. Raises `RequestError`."""
    settings = state.settings
    if not is_multipart(request):
        body = JobRequest.parse(await read_json_object(request))
        if len(body.file_ids) > settings.max_files:
            raise RequestError("invalid_request", f"at most {settings.max_files} files are taken", param="file_ids")
        return JobOrder(await _task_fields(body.task, body.options), body.webhook_url, tuple(body.file_ids))
    form = await receive_form(request, max_files=settings.max_files, parent=settings.upload_dir)
    cleanup.callback(form.discard)
    own = {name: value for name, value in form.options.items() if name in JobForm.model_fields}
    head = JobForm.parse({name: value for name, value in own.items() if value.strip()})
    options = {name: value for name, value in form.options.items() if name not in own and value.strip()}
    return JobOrder(await _task_fields(head.task, options), head.webhook_url, uploads=form.uploads)


async def _task_fields(task: TaskName, options: dict[str, Any]) -> TaskFields:
    fields = SCHEMAS[task].form.parse(options)
    if fields.stream:
        raise RequestError(
            "invalid_request", "A job is followed at /v1/jobs/{id}/events: leave stream out.", param="stream"
        )
    await asyncio.to_thread(fields.to_options)
    return fields


async def _create(state: ServerState, owner: str, order: JobOrder, key: str | None) -> tuple[Job, bool]:
    """Uploads that turn out not to be needed are not kept."""
    digest = None if key is None else await order.digest()
    async with AsyncExitStack() as undo:
        file_ids = list(order.file_ids)
        for upload in order.uploads:
            stored = await keep(state, owner, upload, is_lenient=True)
            undo.push_async_callback(state.jobs.files.delete, owner, stored.id)
            file_ids.append(stored.id)
        job, is_new = await state.jobs.jobs.create(
            owner,
            order.fields.task,
            file_ids,
            order.fields.values(),
            no_cache=order.fields.no_cache,
            webhook_url=order.webhook_url,
            idempotency_key=key,
            request_digest=digest,
        )
        if is_new:
            undo.pop_all()
    return job, is_new
