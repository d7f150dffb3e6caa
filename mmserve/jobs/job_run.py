"""One job from its claim to its end: its files one after the other or at once, as there is room."""

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mmserve.errors import EngineError, ErrorCode, MMServeError, StorageError
from mmserve.jobs.answer_memory import RememberingEngine
from mmserve.jobs.bells import Bells
from mmserve.jobs.counters import JobCounters
from mmserve.jobs.database import Database
from mmserve.jobs.files import FileStore
from mmserve.jobs.page_memory import RememberingReader
from mmserve.jobs.queue import ClaimLost, JobQueue
from mmserve.jobs.records import UNFINISHED, Job
from mmserve.jobs.results import ResultCache, ResultKey
from mmserve.jobs.telling import FileTeller, Teller
from mmserve.jobs.webhooks import WebhookOutbox
from mmserve.jobs.workplace import OwnerTask, Workplace
from mmserve.pipelines.tasks import TASKS

_log = logging.getLogger(__name__)
_FLUSH_SECONDS = 0.25
# What an engine that is started again can answer the next time. The waits are over a minute in all.
_HEALING: frozenset[ErrorCode] = frozenset(("engine_dead", "engine_not_ready", "shutting_down", "queue_full"))
_RETRY_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0)
_UNEXPECTED = MMServeError(
    "internal_error", "The server met a fault of its own with this file; its log has the details."
)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What all jobs of a server are done with. `slots` bounds the documents that are open at once."""

    database: Database
    queue: JobQueue
    files: FileStore
    results: ResultCache
    outbox: WebhookOutbox
    bells: Bells
    workplace: Workplace
    counters: JobCounters
    slots: asyncio.Semaphore
    max_concurrent_documents: int
    retention_seconds: float


class JobRun:
    """Raises `ClaimLost` where the job has ended otherwise, `StorageError` where it cannot go on now."""

    def __init__(self, job: Job, bench: Bench) -> None:
        self._job = job
        self._bench = bench
        self._teller = Teller([file.filename for file in job.files])
        self._file_tellers = [FileTeller(self._teller, index) for index in range(len(job.files))]
        self._writing = asyncio.Lock()

    async def run(self) -> None:
        await self._remember_what_was_told()
        todo = iter([index for index, file in enumerate(self._job.files) if file.status in UNFINISHED])
        obstacle: Exception | None = None
        try:
            async with asyncio.TaskGroup() as group:
                flushing = group.create_task(self._flush_now_and_then())
                num_workers = min(self._bench.max_concurrent_documents, len(self._job.files))
                await asyncio.gather(*(group.create_task(self._work_off(todo)) for _ in range(num_workers)))
                flushing.cancel()
        except* (ClaimLost, StorageError) as errors:
            obstacle = _first(errors)
        if obstacle is not None:
            raise obstacle
        status = await self._bench.queue.finish(self._job.id)
        self._bench.counters.jobs[self._job.task, status] += 1
        self._bench.bells.ring(self._job.id)
        self._bench.outbox.wake()

    async def _remember_what_was_told(self) -> None:
        told: list[list[tuple[str, dict[str, Any]]]] = [[] for _ in self._job.files]
        for event, data in await self._bench.queue.told(self._job.id):
            told[data["index"]].append((event, data))
        for teller, events in zip(self._file_tellers, told, strict=True):
            teller.remember(events)

    async def _work_off(self, todo: Iterator[int]) -> None:
        for index in todo:
            async with self._bench.slots:
                await self._bench.queue.start_file(self._job.id, index)
                await self._do(index)
            self._bench.bells.ring(self._job.id)

    async def _do(self, index: int) -> None:
        job, bench, queue = self._job, self._bench, self._bench.queue
        try:
            options = await asyncio.to_thread(TASKS[job.task].options, job.options)
            wanted = OwnerTask(bench.workplace, bench.results, job.owner, job.task, options, job.no_cache)
            key = wanted.key(job.files[index].sha256)
            result = await self._result(index, wanted, key)
        except (ClaimLost, StorageError):
            raise
        except Exception as error:
            await self._flush()
            await queue.fail_file(job, index, _as_known(error))
            return
        self._file_tellers[index].finish()
        await self._flush()
        await queue.finish_file(job, index, key, result)

    async def _result(self, index: int, wanted: OwnerTask, key: ResultKey | None) -> dict[str, Any]:
        job, bench, tell = self._job, self._bench, self._file_tellers[index]
        known = await wanted.known(key, job.files[index].filename, tell)
        if known is not None:
            return known
        file = await bench.files.get(job.owner, job.files[index].file_id)
        place = bench.workplace
        reader = RememberingReader(place.reader, bench.database, job.owner, bench.retention_seconds)
        engine = RememberingEngine(place.engine_for(job.owner), bench.database, job.id, place.model)
        for seconds in (*_RETRY_SECONDS, None):
            tell.start_again()
            try:
                return await wanted.made(file.path, file.filename, tell, engine=engine, reader=reader)
            except EngineError as error:
                if seconds is None or error.code not in _HEALING:
                    raise
                _log.warning("job %s waits for the engine: %s", job.id, error.code)
                await asyncio.sleep(seconds)
        raise AssertionError("the last attempt returns or raises")

    async def _flush_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(_FLUSH_SECONDS)
            await self._flush()

    async def _flush(self) -> None:
        """One writer at a time, so that events keep their order."""
        async with self._writing:
            if not self._teller.has_news:
                return
            events, progress = self._teller.take()
            await self._bench.queue.tell(self._job.id, events, progress)
        self._bench.bells.ring(self._job.id)


def _first(errors: BaseExceptionGroup[Exception]) -> Exception:
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


def _as_known(error: Exception) -> MMServeError:
    if isinstance(error, MMServeError):
        return error
    _log.error("unexpected error in a job", exc_info=error)
    return _UNEXPECTED
