"""Files, jobs and results of one server: what its routes use, and what works in the background."""

import asyncio
import logging
import secrets
from types import TracebackType
from typing import Self

from sqlalchemy import Connection, delete

from mmserve.errors import MMServeError
from mmserve.jobs.bells import Bells
from mmserve.jobs.counters import JobCounters
from mmserve.jobs.database import Database
from mmserve.jobs.files import FileStore
from mmserve.jobs.job_run import Bench
from mmserve.jobs.queue import JobQueue
from mmserve.jobs.results import ResultCache
from mmserve.jobs.runner import JobRunner
from mmserve.jobs.settings import JobSettings
from mmserve.jobs.storage_errors import storing
from mmserve.jobs.store import JobStore
from mmserve.jobs.tables import page_texts, results
from mmserve.jobs.webhooks import WebhookOutbox
from mmserve.jobs.workplace import Workplace
from mmserve.pipelines.concurrency import end_all

_SWEEP_SECONDS = 3600.0
_log = logging.getLogger(__name__)


class JobService:
    """Entering it brings the database up to date and starts work; leaving it stops work, for the next start to go on.

    Of one event loop. Raises `SetupError` or `StorageError` where the database or the folder cannot be had.
    """

    def __init__(self, settings: JobSettings, workplace: Workplace, *, database: Database | None = None) -> None:
        retention = settings.retention_seconds
        self._settings = settings
        self._database = database or Database(settings.url)
        self.counters = JobCounters()
        self.files = FileStore(
            settings.data_dir / "files",
            self._database,
            retention_seconds=retention,
            max_bytes_of_owner=settings.max_stored_bytes_of_owner,
        )
        self.results = ResultCache(self._database, retention)
        self._outbox = WebhookOutbox(self._database, settings.webhooks)
        bells = Bells()
        queue = JobQueue(
            self._database,
            self.results,
            self._outbox,
            name=secrets.token_hex(8),
            lease_seconds=settings.lease_seconds,
            retention_seconds=retention,
        )
        bench = Bench(
            database=self._database,
            queue=queue,
            files=self.files,
            results=self.results,
            outbox=self._outbox,
            bells=bells,
            workplace=workplace,
            counters=self.counters,
            slots=asyncio.Semaphore(settings.max_concurrent_documents),
            max_concurrent_documents=settings.max_concurrent_documents,
            retention_seconds=retention,
        )
        self._runner = JobRunner(bench, lease_seconds=settings.lease_seconds)
        self.jobs = JobStore(
            self._database,
            queue,
            self._outbox,
            bells,
            self._runner,
            self.counters,
            max_queued_jobs=settings.max_queued_jobs,
            max_queued_jobs_of_owner=settings.max_queued_jobs_of_owner,
            retention_seconds=retention,
        )
        self._background: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        try:
            with storing("Files"):
                self._settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            await self._database.migrate()
            await self.sweep()
        except BaseException:
            await self._database.close()
            raise
        self._runner.start()
        self._background = [asyncio.create_task(self._outbox.run()), asyncio.create_task(self._sweep_hourly())]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await end_all(self._background)
        await self._runner.stop()
        await self._database.close()

    async def sweep(self) -> None:
        """Removes what has been kept for long enough."""
        await self.jobs.sweep()
        await self.files.sweep()

        def forget(connection: Connection) -> None:
            for table in (page_texts, results):
                connection.execute(delete(table).where(table.c.expires_at <= self._database.now()))

        await self._database.write(forget)

    async def _sweep_hourly(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            try:
                await self.sweep()
            except MMServeError as error:
                _log.warning("nothing can be swept: %s", error)
