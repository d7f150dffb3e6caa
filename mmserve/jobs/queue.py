"""The queue as those see it who work it off: a job is claimed for a while, and all that is written needs the claim.

Several servers may share one database. A claim that is not renewed in time, because its server died, is anybody's.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, delete, func, or_, select, update

from mmserve.errors import MMServeError
from mmserve.jobs.database import Database
from mmserve.jobs.event_log import NewEvent, append_events
from mmserve.jobs.job_rows import full_job
from mmserve.jobs.records import UNFINISHED, Job, JobStatus
from mmserve.jobs.results import ResultCache, ResultKey, is_kept
from mmserve.jobs.tables import answers, job_events, job_files, jobs
from mmserve.jobs.webhooks import WebhookOutbox

# A job during which the server died so often is likely to be the cause.
_MAX_STARTS = 5
_GAVE_UP = MMServeError("internal_error", "The server ended several times while it worked on this job, and gave it up.")
_ALL_FAILED = "None of the job's files could be done; each says why."


class ClaimLost(Exception):
    """The job was cancelled or removed, or another server has taken it over."""


@dataclass(frozen=True)
class FileProgress:
    num_pages: int
    num_pages_read: int


class JobQueue:
    """One server's view; `name` is its own. Results of files are kept in `results`, too."""

    def __init__(
        self,
        database: Database,
        results: ResultCache,
        outbox: WebhookOutbox,
        *,
        name: str,
        lease_seconds: float,
        retention_seconds: float,
    ) -> None:
        self._database = database
        self._results = results
        self._outbox = outbox
        self._name = name
        self._lease_seconds = lease_seconds
        self._retention_seconds = retention_seconds

    async def claim(self, held: Collection[str] = ()) -> Job | None:
        """The next job that nobody works on, now this server's: the oldest of the owner with the fewest running.

        None of those that it holds already, even if it was too slow to renew the claim.
        """
        return await self._database.write(partial(self._claim, held=list(held)))

    async def renew(self, job_ids: Collection[str]) -> set[str]:
        """Those of the jobs that are still this server's, for another while."""
        query = (
            update(jobs)
            .where(jobs.c.id.in_(job_ids), self._is_ours)
            .values(lease_until=self._database.now() + self._lease_seconds)
            .returning(jobs.c.id)
        )
        return set(await self._database.write(lambda connection: connection.execute(query).scalars().all()))

    async def release(self, job_id: str | None = None) -> None:
        """The job, or whatever this server has claimed, is in the queue again, and this start does not count."""
        query = update(jobs).where(self._is_ours if job_id is None else and_(self._is_ours, jobs.c.id == job_id))
        again = query.values(status="queued", claimed_by=None, lease_until=None, num_starts=jobs.c.num_starts - 1)
        await self._database.write(lambda connection: connection.execute(again))

    async def told(self, job_id: str) -> Sequence[tuple[str, dict[str, Any]]]:
        """Progress and text that earlier starts of the job have told."""
        query = select(job_events.c.event, job_events.c.data).where(job_events.c.job_id == job_id)
        rows = await self._database.read(
            lambda connection: connection.execute(query.order_by(job_events.c.number)).all()
        )
        return [(row.event, row.data) for row in rows if row.event in ("progress", "delta")]

    async def tell(self, job_id: str, events: Sequence[NewEvent], progress: dict[int, FileProgress]) -> None:
        """Raises `ClaimLost`, as all that follow."""

        def write(connection: Connection) -> None:
            self._require_claim(connection, job_id)
            for index, pages in progress.items():
                _update_file(connection, job_id, index, num_pages=pages.num_pages, num_pages_read=pages.num_pages_read)
            append_events(connection, job_id, events)

        await self._database.write(write)

    async def start_file(self, job_id: str, index: int) -> None:
        def write(connection: Connection) -> None:
            self._require_claim(connection, job_id)
            _update_file(connection, job_id, index, status="running")

        await self._database.write(write)

    async def finish_file(self, job: Job, index: int, key: ResultKey | None, result: dict[str, Any]) -> None:
        """With a key the result is cached for the next who asks, unless its file is gone by now."""
        num_pages = len(result.get("pages", ()))

        def write(connection: Connection) -> None:
            self._require_claim(connection, job.id)
            _update_file(
                connection, job.id, index, status="done", result=result, num_pages=num_pages, num_pages_read=num_pages
            )
            append_events(connection, job.id, [("result", {"index": index, "name": job.files[index].filename})])
            if key is not None and not result["cached"] and is_kept(connection, job.owner, key.sha256):
                self._results.put_within(connection, job.owner, key, result)

        await self._database.write(write)

    async def fail_file(self, job: Job, index: int, error: MMServeError) -> None:
        event = {"index": index, "name": job.files[index].filename, "error": error.to_dict()}

        def write(connection: Connection) -> None:
            self._require_claim(connection, job.id)
            _update_file(connection, job.id, index, status="failed", error=error.to_dict())
            append_events(connection, job.id, [("error", event)])

        await self._database.write(write)

    async def finish(self, job_id: str) -> JobStatus:
        """Ends a job all of whose files have ended."""

        def write(connection: Connection) -> JobStatus:
            self._require_claim(connection, job_id)
            query = select(job_files.c.status, job_files.c.error).where(job_files.c.job_id == job_id)
            ended = connection.execute(query).all()
            if any(row.status == "done" for row in ended):
                return self._end(connection, job_id, "done", None)
            error = ended[0].error if len(ended) == 1 else {**ended[0].error, "message": _ALL_FAILED}
            return self._end(connection, job_id, "failed", error)

        return await self._database.write(write)

    def cancel_within(self, connection: Connection, job_id: str) -> None:
        """Ends a job that is queued or running, whoever works on it."""
        _end_files(connection, job_id, status="cancelled")
        self._end(connection, job_id, "cancelled", None)

    def _claim(self, connection: Connection, held: list[str]) -> Job | None:
        now = self._database.now()
        next_free = _next_free(now).where(jobs.c.id.not_in(held))
        while (row := connection.execute(next_free).one_or_none()) is not None:
            if row.num_starts >= _MAX_STARTS:
                self._give_up(connection, row.id)
                continue
            claimed = (
                update(jobs)
                .where(jobs.c.id == row.id)
                .values(
                    status="running",
                    claimed_by=self._name,
                    lease_until=now + self._lease_seconds,
                    started_at=func.coalesce(jobs.c.started_at, now),
                    num_starts=jobs.c.num_starts + 1,
                )
                .returning(*jobs.c)
            )
            return full_job(connection, connection.execute(claimed).one())
        return None

    def _give_up(self, connection: Connection, job_id: str) -> None:
        _end_files(connection, job_id, status="failed", error=_GAVE_UP.to_dict())
        self._end(connection, job_id, "failed", _GAVE_UP.to_dict())

    def _end(self, connection: Connection, job_id: str, status: JobStatus, error: dict[str, Any] | None) -> JobStatus:
        now = self._database.now()
        ended = (
            update(jobs)
            .where(jobs.c.id == job_id)
            .values(
                status=status,
                error=error,
                finished_at=now,
                expires_at=now + self._retention_seconds,
                claimed_by=None,
                lease_until=None,
            )
            .returning(*jobs.c)
        )
        row = connection.execute(ended).one()
        append_events(connection, job_id, [("done", {"status": status})])
        connection.execute(delete(answers).where(answers.c.job_id == job_id))
        if row.webhook_url is not None:
            self._outbox.put_within(connection, full_job(connection, row))
        return status

    @property
    def _is_ours(self) -> ColumnElement[bool]:
        return and_(jobs.c.claimed_by == self._name, jobs.c.status == "running")

    def _require_claim(self, connection: Connection, job_id: str) -> None:
        query = select(jobs.c.id).where(jobs.c.id == job_id, self._is_ours).with_for_update()
        if connection.execute(query).first() is None:
            raise ClaimLost


def _next_free(now: float) -> Any:
    others = jobs.alias()
    num_running = (
        select(func.count())
        .where(others.c.owner == jobs.c.owner, others.c.status == "running", others.c.lease_until > now)
        .scalar_subquery()
    )
    is_free = or_(jobs.c.status == "queued", and_(jobs.c.status == "running", jobs.c.lease_until <= now))
    query = select(jobs.c.id, jobs.c.num_starts).where(is_free).order_by(num_running, jobs.c.id).limit(1)
    return query.with_for_update(skip_locked=True)


def _end_files(connection: Connection, job_id: str, **values: Any) -> None:
    """Those that have not ended yet."""
    unfinished = and_(job_files.c.job_id == job_id, job_files.c.status.in_(UNFINISHED))
    connection.execute(update(job_files).where(unfinished).values(**values))


def _update_file(connection: Connection, job_id: str, index: int, **values: Any) -> None:
    is_file = and_(job_files.c.job_id == job_id, job_files.c.index == index)
    connection.execute(update(job_files).where(is_file).values(**values))
