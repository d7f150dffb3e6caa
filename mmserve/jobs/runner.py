"""Works off the queue: so many jobs at once, each in a task of its own."""

import asyncio
import contextlib
import logging

from mmserve.errors import MMServeError
from mmserve.jobs.bells import heard
from mmserve.jobs.job_run import Bench, JobRun
from mmserve.jobs.queue import ClaimLost
from mmserve.jobs.records import Job
from mmserve.pipelines.concurrency import end_all

_log = logging.getLogger(__name__)
# New jobs are announced; those that another server has left behind are not.
_POLL_SECONDS = 2.0
_OBSTACLE_SECONDS = 2.0


class JobRunner:
    """Claims are renewed in a third of `lease_seconds`. `stop` leaves what is unfinished to the next start."""

    def __init__(self, bench: Bench, *, lease_seconds: float) -> None:
        self._bench = bench
        self._renew_seconds = lease_seconds / 3
        self._bell = asyncio.Event()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._loops: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._loops = [asyncio.create_task(self._claim_jobs()), asyncio.create_task(self._keep_claims())]

    async def stop(self) -> None:
        for tasks in (self._loops, list(self._running.values())):
            await end_all(tasks)
        with contextlib.suppress(MMServeError):
            await self._bench.queue.release()

    def wake(self) -> None:
        self._bell.set()

    async def stop_job(self, job_id: str) -> None:
        """Returns when nothing of the job is under way here any more."""
        task = self._running.get(job_id)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _claim_jobs(self) -> None:
        while True:
            self._bell.clear()
            try:
                while self._bench.workplace.is_ready and len(self._running) < self._bench.max_concurrent_documents:
                    job = await self._bench.queue.claim(self._running.keys())
                    if job is None:
                        break
                    self._start(job)
            except MMServeError as error:
                _log.warning("no job can be taken up: %s", error)
            await heard(self._bell, _POLL_SECONDS)

    def _start(self, job: Job) -> None:
        task = self._running[job.id] = asyncio.create_task(self._run(job))
        self._bench.counters.num_running = len(self._running)
        task.add_done_callback(lambda _task: self._ended(job.id))

    def _ended(self, job_id: str) -> None:
        del self._running[job_id]
        self._bench.counters.num_running = len(self._running)
        self.wake()

    async def _run(self, job: Job) -> None:
        try:
            await JobRun(job, self._bench).run()
        except ClaimLost:
            _log.info("job %s has ended, or is another server's now", job.id)
        except MMServeError as error:
            _log.warning("job %s has to wait: %s", job.id, error)
            await self._put_back(job.id)
        except Exception:
            # Its claim runs out, and after some starts it is given up.
            _log.exception("job %s met a fault", job.id)

    async def _put_back(self, job_id: str) -> None:
        """After a moment, so that an obstacle is not run against all the time, and when the database takes it."""
        is_back = False
        while not is_back:
            await asyncio.sleep(_OBSTACLE_SECONDS)
            with contextlib.suppress(MMServeError):
                await self._bench.queue.release(job_id)
                is_back = True

    async def _keep_claims(self) -> None:
        while True:
            await asyncio.sleep(self._renew_seconds)
            held = set(self._running)
            if not held:
                continue
            try:
                lost = held - await self._bench.queue.renew(held)
            except MMServeError as error:
                _log.warning("claims cannot be renewed: %s", error)
                continue
            for job_id in lost & self._running.keys():
                self._running[job_id].cancel()
