"""Jobs in the database: made, looked up, cancelled, removed, followed."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from mmserve.jobs.records import Job, JobEvent, JobStatus
from mmserve.pipelines.tasks import TaskName


class JobStore:
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
        raise NotImplementedError

    async def get(self, owner: str, job_id: str) -> Job:
        """With its results. Raises `RequestError` (`not_found`)."""
        raise NotImplementedError

    async def list(
        self, owner: str, *, limit: int = 20, after: str | None = None, status: JobStatus | None = None
    ) -> tuple[Sequence[Job], bool]:
        """The newest first, those older than the job `after`, without results; and whether there are more."""
        raise NotImplementedError

    async def cancel(self, owner: str, job_id: str) -> Job:
        """Ends a job that is queued or running, and with it the engine's work; one that has ended stays as it is.

        Raises `RequestError` (`not_found`).
        """
        raise NotImplementedError

    async def remove(self, owner: str, job_id: str) -> None:
        """Removes a job that has ended, with its results and events.

        Raises `RequestError`: `not_found`, `invalid_request` for one that has not ended.
        """
        raise NotImplementedError

    async def events(self, owner: str, job_id: str, after: int = 0) -> AsyncGenerator[JobEvent, None]:
        """The job's events with numbers above `after`, then those to come, up to `done`.

        Raises `RequestError` (`not_found`) before the first.
        """
        raise NotImplementedError
        yield
