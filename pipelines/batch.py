"""Many documents through one function: concurrently, in bounded memory, equal contents once, failures apart."""

import asyncio
import errno
import hashlib
import itertools
import logging
import pickle
import random
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast

from mmserve.errors import DocumentError, EngineError, ErrorCode, MMServeError, RequestError, SetupError

R = TypeVar("R")
R_contra = TypeVar("R_contra", contravariant=True)
_log = logging.getLogger(__name__)

# Writing anything more would fail in the same way.
_FATAL_ERRNOS = frozenset({errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EROFS})
_FATAL_CODES: frozenset[ErrorCode] = frozenset({"engine_dead", "shutting_down"})
# What may go better a moment later. A document that is damaged stays so.
_HEALING_CODES: frozenset[ErrorCode] = frozenset({"queue_full", "engine_not_ready", "timeout"})
_HEALING_ERRNOS = frozenset(
    {errno.EAGAIN, errno.EINTR, errno.EIO, errno.EBUSY, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE}
    | {errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNABORTED, errno.EHOSTUNREACH, errno.ENETUNREACH}
)
_LONGEST_DELAY = 30.0
_sleep = asyncio.sleep


@dataclass(frozen=True)
class Source:
    """A document to read.

    `name` is unique in a batch. `problem` says why it cannot be read, where that is known beforehand. `shown` is what
    its user knows it by, where that is not the path.
    """

    path: Path
    name: str
    problem: str | None = None
    shown: str | None = None

    @property
    def label(self) -> str:
        return displayable(self.path) if self.shown is None else self.shown

    @property
    def title(self) -> str:
        """The name, for results: always text that can be written."""
        return displayable(self.name)


@dataclass(frozen=True)
class Failure:
    """Why a document was not done, or one `page` (from 1) of it not read."""

    path: str
    code: ErrorCode
    message: str
    page: int | None = None

    def to_dict(self) -> dict[str, Any]:
        line: dict[str, Any] = {"path": self.path, "code": self.code, "message": self.message}
        return line if self.page is None else line | {"page": self.page}


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """`jobs` documents are open at once; `timeout` is in seconds for each; `fail_fast` stops at the first failure.

    What may heal is tried again up to `retries` times, after `first_delay` seconds, then twice that, and so on; later
    where who is overloaded says so.
    """

    jobs: int = 4
    timeout: float | None = None
    fail_fast: bool = False
    retries: int = 2
    first_delay: float = 0.5

    def __post_init__(self) -> None:
        if self.jobs < 1:
            raise RequestError("invalid_request", "--jobs must be at least 1", param="jobs")
        if self.timeout is not None and self.timeout <= 0:
            raise RequestError("invalid_request", "--timeout must be above 0", param="timeout")
        if self.retries < 0:
            raise RequestError("invalid_request", "--retries must not be negative", param="retries")


@dataclass
class BatchTotals:
    """`num_copied` of the documents done were equal to another one; `num_skipped` had been done before."""

    num_done: int = 0
    num_copied: int = 0
    num_skipped: int = 0
    num_failed: int = 0


class Sink(Protocol[R_contra]):
    """Where results go. `digest` is the SHA-256 of the document's bytes, in hexadecimal."""

    def is_done(self, source: Source, digest: str) -> bool: ...

    def write(self, source: Source, digest: str, result: R_contra) -> None: ...

    def fail(self, failure: Failure) -> None: ...


async def run_batch(
    sources: Iterable[Source],
    work: Callable[[Source], Awaitable[R]],
    sink: Sink[R],
    options: BatchOptions | None = None,
    totals: BatchTotals | None = None,
) -> BatchTotals:
    """Pass every source through `work` and its result to `sink`, as they finish; `totals` is kept up to date meanwhile.

    `work` must give the same result for the same bytes; results must be picklable. A document's error ends that
    document alone. What concerns all of them is raised: `SetupError`, an `EngineError` of a dead engine, an `OSError`
    of a full disk or a closed pipe.
    """
    batch = _Batch(work, sink, options or BatchOptions(), totals or BatchTotals())
    with batch.results:
        await batch.run(iter(sources))
    return batch.totals


def displayable(path: Path | str) -> str:
    """A path as text that can always be written: bytes that are not UTF-8 are shown as escapes."""
    return str(path).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _FirstFailure(Exception):
    """Ends a batch that should stop at its first failure."""


class _ResultStore(Generic[R]):
    """Results by digest, kept in a nameless temporary file so that memory holds only where they begin."""

    # Pickle is safe here: no other process can reach a nameless file.

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="mmserve-")  # noqa: SIM115
        self._offsets: dict[bytes, int] = {}

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def put(self, digest: str, result: R) -> None:
        offset = self._file.seek(0, 2)
        pickle.dump(result, self._file)
        self._offsets[bytes.fromhex(digest)] = offset

    def get(self, digest: str) -> R | None:
        offset = self._offsets.get(bytes.fromhex(digest))
        if offset is None:
            return None
        self._file.seek(offset)
        return cast(R, pickle.load(self._file))


class _Batch(Generic[R]):
    def __init__(
        self, work: Callable[[Source], Awaitable[R]], sink: Sink[R], options: BatchOptions, totals: BatchTotals
    ) -> None:
        self.totals = totals
        self.results = _ResultStore[R]()
        self._work = work
        self._sink = sink
        self._options = options
        self._in_progress: dict[str, asyncio.Event] = {}

    async def run(self, sources: Iterator[Source]) -> None:
        fatal: Exception | None = None
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._options.jobs):
                    group.create_task(self._worker(sources))
        except* _FirstFailure:
            pass
        except* Exception as errors:
            fatal = errors.exceptions[0]
        if fatal is not None:
            raise fatal

    async def _worker(self, sources: Iterator[Source]) -> None:
        for source in sources:
            failure = await self._process(source)
            if failure is None:
                continue
            self.totals.num_failed += 1
            self._sink.fail(failure)
            if self._options.fail_fast:
                raise _FirstFailure

    async def _process(self, source: Source) -> Failure | None:
        for attempt in itertools.count():
            try:
                await self._do(source)
                return None
            except Exception as error:
                is_last = attempt == self._options.retries or not may_heal(error)
                if is_last and _concerns_all(error):
                    raise
                _log.debug("%s failed.", source.label, exc_info=True)
                if is_last:
                    return _failure(source, error)
                delay = max(self._delay(attempt), _asked_delay(error))
            await _sleep(delay)
        raise AssertionError("unreachable")

    def _delay(self, attempt: int) -> float:
        """Seconds, a little at random: so that all that failed together are not back together."""
        delay = min(self._options.first_delay * 2.0**attempt, _LONGEST_DELAY)
        return delay * random.uniform(1.0, 1.5)

    async def _do(self, source: Source) -> None:
        if source.problem is not None:
            raise RequestError("invalid_request", source.problem)
        digest = await asyncio.to_thread(file_digest, source.path)
        if self._sink.is_done(source, digest):
            self.totals.num_skipped += 1
            return
        copy = await self._equal_result(digest)
        result = await self._compute(source, digest) if copy is None else copy
        self._sink.write(source, digest, result)
        self.totals.num_done += 1
        self.totals.num_copied += copy is not None

    async def _equal_result(self, digest: str) -> R | None:
        """The result of another document with the same bytes, also of one being worked on."""
        while digest in self._in_progress:
            await self._in_progress[digest].wait()
        return self.results.get(digest)

    async def _compute(self, source: Source, digest: str) -> R:
        finished = self._in_progress[digest] = asyncio.Event()
        try:
            async with asyncio.timeout(self._options.timeout) as deadline:
                result = await self._work(source)
            self.results.put(digest, result)
            return result
        except TimeoutError:
            if not deadline.expired():
                raise
            message = f"not done within {self._options.timeout:g} seconds: a longer --timeout gives it more time"
            raise RequestError("timeout", message) from None
        finally:
            del self._in_progress[digest]
            finished.set()


def may_heal(error: Exception) -> bool:
    """Whether the same document may be done a moment later."""
    if isinstance(error, MMServeError):
        is_own_limit = isinstance(error, RequestError) and not isinstance(error, DocumentError)
        return (error.code in _HEALING_CODES or error.retry_after is not None) and not is_own_limit
    return isinstance(error, OSError) and (error.errno in _HEALING_ERRNOS or isinstance(error, TimeoutError))


def _concerns_all(error: Exception) -> bool:
    if isinstance(error, EngineError):
        return error.code in _FATAL_CODES
    return isinstance(error, SetupError) or (isinstance(error, OSError) and error.errno in _FATAL_ERRNOS)


def _asked_delay(error: Exception) -> float:
    return error.retry_after or 0.0 if isinstance(error, MMServeError) else 0.0


def _failure(source: Source, error: Exception) -> Failure:
    match error:
        case MMServeError():
            return Failure(source.label, error.code, error.message)
        case FileNotFoundError():
            return Failure(source.label, "not_found", "the file is not there any more")
        case OSError():
            return Failure(source.label, "internal_error", f"{error.strerror or error}")
        case _:
            return Failure(source.label, "internal_error", f"unexpected {type(error).__name__}: {error}")
