"""Page workers as processes: a crash, a hang or a bomb costs the one task that caused it.

pebble tells a task whose process died. Where one dies with nothing to do, or cannot start, it gives the whole pool up
and all that waits: those tasks are no one's fault, and go to a new pool.
"""

import asyncio
import logging
import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.util import Finalize
from typing import Any, Protocol

from mmserve.errors import DocumentError, EngineError, MMServeError, SetupError, frames_of
from mmserve.vision.page_types import MAX_CROWDING, PageLimits, PageOptions

_MAX_OCR_THREADS = 4
_MAX_POOLS = 3
_CRASH = "reading it made the reader crash or run out of memory"
logger = logging.getLogger(__name__)


class Worker(Protocol):
    """What a process holds; its other methods are called by name."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class WorkerEntry:
    """What a process is set up with: `start` gives the worker whose methods are called from then on."""

    start: Callable[..., Worker]
    arguments: tuple[Any, ...]


class WorkerFault(Exception):
    """What a worker did not foresee: `kind` of exception, and where. Its words stay there: they may quote the page."""

    def __init__(self, kind: str, frames: str) -> None:
        super().__init__(kind, frames)
        self.kind = kind
        self.frames = frames


class WorkerPool:
    """Starts its processes at the first task."""

    def __init__(
        self,
        num_workers: int,
        limits: PageLimits,
        options: PageOptions,
        entry: Callable[[], WorkerEntry] | None = None,
    ) -> None:
        """`entry` is asked when the first process starts: what it imports is not needed before. By default a page
        worker's."""
        self._num_workers = num_workers
        self._limits = limits
        self._options = options
        self._load_entry = entry or self._page_worker
        self._pool: Any = None
        self._futures: set[Any] = set()
        self._is_closed = False
        self._lock = threading.Lock()

    async def call(self, method: str, *args: object, timeout: float, attempts: int = 2) -> Any:
        """One call of a worker's method; tried again where the worker dies, but not where it exceeds `timeout` seconds,
        or as much longer as the machine is crowded.

        Raises `DocumentError`: `page_timeout`, or `corrupt_document` for a task that kills its worker each time. Raises
        `SetupError` where no worker can be started.
        """
        from pebble.common import ProcessExpired

        for _ in range(attempts):
            try:
                return await self._run(method, args, timeout * _crowding())
            except TimeoutError:
                logger.warning("a page worker was ended: %s took more than %g seconds", method, timeout)
                raise DocumentError(
                    "page_timeout", f"reading it took more than {timeout:g} seconds (--page-timeout)"
                ) from None
            except ProcessExpired:
                logger.warning("a page worker died in %s", method)
            except MMServeError:
                raise
            except asyncio.CancelledError:
                raise self._cancellation() from None
            except WorkerFault as fault:
                logger.error("a page worker failed in %s: %s\n%s", method, fault.kind, fault.frames)
                raise DocumentError("corrupt_document", f"the reader failed on it ({fault.kind})") from None
            except Exception as error:
                if self._is_closed:
                    raise reader_closed() from None
                logger.error("a page worker failed in %s: %s", method, frames_of(error))
                raise DocumentError("corrupt_document", f"the reader failed on it ({type(error).__name__})") from None
        raise DocumentError("corrupt_document", _CRASH)

    async def _run(self, method: str, args: tuple[object, ...], timeout: float) -> Any:
        """One attempt, in as many pools as it takes until one holds."""
        for _ in range(_MAX_POOLS):
            try:
                return await asyncio.wrap_future(self._schedule(method, args, timeout))
            except BrokenProcessPool:
                logger.warning("the page workers died before they had begun with %s; others are started", method)
        raise SetupError("internal_error", "the processes that read pages cannot be started: the log says why")

    def _cancellation(self) -> BaseException:
        """What a cancelled call means: the caller's own wish, or that `close` has ended the processes."""
        task = asyncio.current_task()
        if self._is_closed and task is not None and not task.cancelling():
            return reader_closed()
        return asyncio.CancelledError()

    def close(self) -> None:
        """Ends the processes, and fails what is still under way."""
        with self._lock:
            pool, self._pool, self._is_closed = self._pool, None, True
        if pool is not None:
            pool.stop()
            pool.join()
        # a stopped pool forgets what was waiting; nobody may wait for it for ever
        for future in tuple(self._futures):
            future.cancel()

    def _schedule(self, method: str, args: tuple[object, ...], timeout: float) -> Any:
        with self._lock:
            if self._is_closed:
                raise reader_closed()
            if self._pool is None or not self._pool.active:
                self._replace_pool()
            try:
                future: Any = self._pool.schedule(_call_worker, args=(method, *args), timeout=timeout)
            except RuntimeError as error:
                # It has ended since it was looked at.
                raise BrokenProcessPool(str(error)) from None
            self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        return future

    def _page_worker(self) -> WorkerEntry:
        from mmserve.vision.page_workers import start_page_worker

        num_threads = min(_MAX_OCR_THREADS, max(1, (os.cpu_count() or 1) // self._num_workers))
        return WorkerEntry(start_page_worker, (self._limits, self._options, num_threads))

    def _replace_pool(self) -> None:
        broken, self._pool = self._pool, self._start()
        if broken is not None:
            # Its other processes; that may take seconds, and nobody waits for it.
            threading.Thread(target=broken.join, name="end-page-workers", daemon=True).start()

    def _start(self) -> Any:
        from pebble import ProcessPool

        entry = self._load_entry()
        return ProcessPool(
            max_workers=self._num_workers,
            initializer=_start_worker,
            initargs=(entry.start, entry.arguments),
            context=multiprocessing.get_context("spawn"),
        )


def _crowding() -> float:
    """How many programs there are for a core, at least 1. A worker gives way to the others."""
    return min(max(os.getloadavg()[0] / (os.cpu_count() or 1), 1.0), MAX_CROWDING)


_worker: Worker | None = None


def _start_worker(start: Callable[..., Worker], arguments: tuple[Any, ...]) -> None:
    """Runs in a new process of the pool."""
    global _worker
    _worker = start(*arguments)
    # pypdfium2 complains on the terminal of a document that is open when its process ends.
    Finalize(None, _worker.close, exitpriority=0)


def _call_worker(method: str, *args: object) -> Any:
    """One call of a method of this process' worker."""
    try:
        return getattr(_worker, method)(*args)
    except MMServeError:
        raise
    except Exception as error:
        raise WorkerFault(type(error).__name__, frames_of(error)) from None


def reader_closed() -> EngineError:
    """For what `close` has cut short."""
    return EngineError("shutting_down", "the page reader is closed")
