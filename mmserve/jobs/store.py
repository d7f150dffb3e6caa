"""Jobs in the database: made, looked up, cancelled, removed, followed."""

import asyncio
import builtins
import hashlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from typing import Any

from sqlalchemy import Connection, delete, func, insert, select
from sqlalchemy.exc import IntegrityError

from mmserve.errors import EngineError, RequestError
from mmserve.jobs.bells import Bells, heard
from mmserve.jobs.counters import JobCounters
from mmserve.jobs.database import Database, newest
from mmserve.jobs.event_log import events_after
from mmserve.jobs.ids import new_id, not_found, require_cursor, require_id
from mmserve.jobs.job_rows import find_job, jobs_without_results
from mmserve.jobs.queue import JobQueue
from mmserve.jobs.records import UNFINISHED, Job, JobEvent, JobStatus
from mmserve.jobs.runner import JobRunner
from mmserve.jobs.tables import files, job_files, jobs
from mmserve.jobs.webhooks import WebhookOutbox
from mmserve.pipelines.tasks import TASKS, TaskName

# A job may be worked on by another server, which rings no bell here.
_POLL_SECONDS = 2.0


class JobStore:
    """At most `max_queued_jobs` wait, of one owner `max_queued_jobs_of_owner`.

    Jobs are kept for `retention_seconds` after their end.
    """

    def __init__(
        self,
        database: Database,
        queue: JobQueue,
        outbox: WebhookOutbox,
        bells: Bells,
        runner: JobRunner,
        counters: JobCounters,
        *,
        max_queued_jobs: int,
        max_queued_jobs_of_owner: int,
        retention_seconds: float,
    ) -> None:
        self._database = database
        self._queue = queue
        self._outbox = outbox
        self._bells = bells
        self._runner = runner
        self._counters = counters
        self._max_queued_jobs = max_queued_jobs
        self._max_queued_jobs_of_owner = max_queued_jobs_of_owner
        self._retention_seconds = retention_seconds

    async def create(
        self,
        owner: str,
        task: TaskName,
        file_ids: Sequence[str],
        options: Mapping[str, Any],
        *,
        no_cache: bool = False,
        webhook_url: str | None = None,
        idempotency_key: str | None = None,
        request_digest: str | None = None,
    ) -> tuple[Job, bool]:
        """The job and whether it is new: with an idempotency key that the owner has used it is the job of that time.

        Raises `RequestError`: `invalid_request` for options that do not fit, `not_found` for a file, `url_not_allowed`,
        `idempotency_conflict` for a key that was used with another digest; `EngineError` (`queue_full`).
        """
        await asyncio.to_thread(_check, task, file_ids, options)
        if webhook_url is not None:
            self._outbox.check(webhook_url)
        now = self._database.now()
        # A client's key is of any length, and nobody else's business.
        key = None if idempotency_key is None else hashlib.sha256(idempotency_key.encode()).hexdigest()
        row = {
            "id": new_id("job", now),
            "owner": owner,
            "task": task,
            "options": dict(options),
            "status": "queued",
            "no_cache": no_cache,
            "created_at": now,
            "expires_at": now + self._retention_seconds,
            "webhook_url": webhook_url,
            "idempotency_key": key,
            "request_digest": request_digest,
            "num_events": 0,
            "num_starts": 0,
        }
        try:
            job, is_new = await self._database.write(lambda connection: self._create(connection, row, file_ids))
        except IntegrityError:
            # Another server was asked with the same key at the same time.
            job, is_new = await self._database.write(lambda connection: self._create(connection, row, file_ids))
        if is_new:
            self._runner.wake()
        return job, is_new

    async def get(self, owner: str, job_id: str) -> Job:
        """With its results. Raises `RequestError` (`not_found`)."""
        require_id("job", job_id)
        job = await self._database.read(lambda connection: find_job(connection, owner, job_id))
        if job is None:
            raise not_found("job")
        return job

    async def list(
        self, owner: str, *, limit: int = 20, after: str | None = None, status: JobStatus | None = None
    ) -> tuple[Sequence[Job], bool]:
        """The newest first, those older than the job `after`, without results; and whether there are more."""
        cursor = require_cursor(after)
        where = [jobs.c.owner == owner, *([] if status is None else [jobs.c.status == status])]

        def find(connection: Connection) -> tuple[builtins.list[Job], bool]:
            rows, has_more = newest(connection, jobs, *where, limit=limit, after=cursor)
            return jobs_without_results(connection, rows), has_more

        return await self._database.read(find)

    async def cancel(self, owner: str, job_id: str) -> Job:
        """Ends a job that is queued or running, and with it the engine's work; one that has ended stays as it is.

        Raises `RequestError` (`not_found`).
        """
        require_id("job", job_id)

        def end(connection: Connection) -> tuple[Job, bool]:
            is_job = (jobs.c.owner == owner) & (jobs.c.id == job_id)
            status = connection.execute(select(jobs.c.status).where(is_job).with_for_update()).scalar_one_or_none()
            is_unfinished = status in UNFINISHED
            if is_unfinished:
                self._queue.cancel_within(connection, job_id)
            job = find_job(connection, owner, job_id)
            if job is None:
                raise not_found("job")
            return job, is_unfinished

        job, was_unfinished = await self._database.write(end)
        self._counters.jobs[job.task, "cancelled"] += was_unfinished
        self._bells.ring(job_id)
        self._outbox.wake()
        await self._runner.stop_job(job_id)
        return job

    async def remove(self, owner: str, job_id: str) -> None:
        """Removes a job that has ended, with its results and events.

        Raises `RequestError`: `not_found`, `invalid_request` for one that has not ended.
        """
        require_id("job", job_id)

        def forget(connection: Connection) -> None:
            is_job = (jobs.c.owner == owner) & (jobs.c.id == job_id)
            has_ended = jobs.c.status.not_in(UNFINISHED)
            if connection.execute(delete(jobs).where(is_job, has_ended)).rowcount:
                return
            if connection.execute(select(jobs.c.id).where(is_job)).first() is None:
                raise not_found("job")
            raise RequestError("invalid_request", "The job has not ended yet: cancel it first.")

        await self._database.write(forget)

    async def events(self, owner: str, job_id: str, after: int = 0) -> AsyncGenerator[JobEvent, None]:
        """The job's events with numbers above `after`, then those to come, up to `done`.

        Raises `RequestError` (`not_found`) where there is no such job, or none any more.
        """
        await self.get(owner, job_id)
        with self._bells.listening(job_id) as bell:
            while True:
                bell.clear()
                status, events = await self._database.read(partial(_news, job_id=job_id, after=after))
                for event in events:
                    yield event
                    after = event.number
                if status is None:
                    raise not_found("job")
                if status not in UNFINISHED and (not events or events[-1].event == "done"):
                    return
                if not events:
                    await heard(bell, _POLL_SECONDS)

    async def sweep(self) -> None:
        """Removes jobs whose time has come."""
        has_expired = (jobs.c.expires_at <= self._database.now()) & jobs.c.status.not_in(UNFINISHED)
        await self._database.write(lambda connection: connection.execute(delete(jobs).where(has_expired)))

    def _create(self, connection: Connection, row: dict[str, Any], file_ids: Sequence[str]) -> tuple[Job, bool]:
        earlier = self._earlier(connection, row)
        if earlier is not None:
            return earlier, False
        self._require_room(connection, row["owner"])
        wanted = _wanted_files(connection, row["owner"], file_ids)
        connection.execute(insert(jobs), row)
        connection.execute(
            insert(job_files),
            [
                {"job_id": row["id"], "index": index, "status": "queued", "num_pages_read": 0, **file}
                for index, file in enumerate(wanted)
            ],
        )
        job = find_job(connection, row["owner"], row["id"])
        assert job is not None
        return job, True

    def _require_room(self, connection: Connection, owner: str) -> None:
        is_queued = jobs.c.status == "queued"
        num_queued = connection.execute(select(func.count()).where(is_queued)).scalar_one()
        if num_queued >= self._max_queued_jobs:
            raise EngineError("queue_full", f"{num_queued} jobs are waiting already. Try again later.")
        num_own = connection.execute(select(func.count()).where(is_queued, jobs.c.owner == owner)).scalar_one()
        if num_own >= self._max_queued_jobs_of_owner:
            raise EngineError("queue_full", f"{num_own} of your jobs are waiting already. Try again later.")

    def _earlier(self, connection: Connection, row: dict[str, Any]) -> Job | None:
        if row["idempotency_key"] is None:
            return None
        query = select(jobs.c.id, jobs.c.request_digest).where(
            jobs.c.owner == row["owner"], jobs.c.idempotency_key == row["idempotency_key"]
        )
        found = connection.execute(query).one_or_none()
        if found is None:
            return None
        if found.request_digest != row["request_digest"]:
            raise RequestError(
                "idempotency_conflict",
                "This Idempotency-Key was used for another request: take a new key for each job.",
                param="Idempotency-Key",
            )
        return find_job(connection, row["owner"], found.id)


def _news(connection: Connection, job_id: str, after: int) -> tuple[JobStatus | None, list[JobEvent]]:
    """The job's status, None if it was removed, and events after that number: asked later, so that none is missed."""
    status = connection.execute(select(jobs.c.status).where(jobs.c.id == job_id)).scalar_one_or_none()
    return status, events_after(connection, job_id, after)


def _check(task: TaskName, file_ids: Sequence[str], options: Mapping[str, Any]) -> None:
    if task not in TASKS:
        raise RequestError("invalid_request", f"task must be one of {', '.join(TASKS)}", param="task")
    TASKS[task].options(options)
    if not file_ids:
        raise RequestError("invalid_request", "a job needs at least one file", param="file_ids")
    for file_id in file_ids:
        require_id("file", file_id)


def _wanted_files(connection: Connection, owner: str, file_ids: Sequence[str]) -> list[dict[str, Any]]:
    columns = (files.c.id.label("file_id"), files.c.filename, files.c.sha256)
    query = select(*columns).where(files.c.owner == owner, files.c.id.in_(file_ids))
    found = {row.file_id: dict(row._mapping) for row in connection.execute(query)}
    for file_id in file_ids:
        if file_id not in found:
            raise RequestError("not_found", f"There is no file {file_id}.", param="file_ids")
    return [found[file_id] for file_id in file_ids]
