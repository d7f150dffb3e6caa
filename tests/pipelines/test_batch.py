"""Many documents through one function: order, bounds, equal contents, failures, interruption."""

import asyncio
import errno
import gc
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mmserve.errors import DocumentError, EngineError, RequestError, SetupError
from mmserve.pipelines.batch import (
    BatchOptions,
    BatchTotals,
    Failure,
    Source,
    displayable,
    file_digest,
    run_batch,
)

AT_ONCE = BatchOptions(first_delay=0.0)


@dataclass(frozen=True)
class Text:
    """What the work of these tests makes of a document."""

    text: str


@dataclass
class MemorySink:
    done: frozenset[str] = frozenset()
    written: dict[str, str] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)

    def is_done(self, source: Source, digest: str) -> bool:
        return digest in self.done

    def write(self, source: Source, digest: str, result: Text) -> None:
        assert digest == file_digest(source.path)
        self.written[source.name] = result.text

    def fail(self, failure: Failure) -> None:
        self.failures.append(failure)


@dataclass
class Work:
    """Reads the document; texts that begin with `bad` raise. Counts what runs at once."""

    seen: list[str] = field(default_factory=list)
    num_open: int = 0
    most_open: int = 0

    async def __call__(self, source: Source) -> Text:
        self.seen.append(source.name)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            await asyncio.sleep(0.001)
            text = source.path.read_text()
            if text.startswith("bad"):
                raise DocumentError("corrupt_document", f"{source.name} is cut off.")
            return Text(text.upper())
        finally:
            self.num_open -= 1


def write_documents(folder: Path, texts: dict[str, str]) -> list[Source]:
    for name, text in texts.items():
        (folder / name).write_text(text)
    return [Source(folder / name, name) for name in texts]


def test_every_document_is_done_and_at_most_jobs_are_open(tmp_path: Path) -> None:
    sources = write_documents(tmp_path, {f"{i}.txt": f"text {i}" for i in range(20)})
    work, sink = Work(), MemorySink()
    totals = asyncio.run(run_batch(sources, work, sink, BatchOptions(jobs=3)))
    assert sink.written == {f"{i}.txt": f"TEXT {i}" for i in range(20)}
    assert work.most_open == 3
    assert totals == BatchTotals(num_done=20)


def test_sources_are_asked_for_only_when_there_is_room(tmp_path: Path) -> None:
    sources = write_documents(tmp_path, {f"{i}.txt": f"text {i}" for i in range(10)})
    work, ahead = Work(), []

    def counted() -> Iterator[Source]:
        for num_taken, source in enumerate(sources, start=1):
            ahead.append(num_taken - len(work.seen))
            yield source

    asyncio.run(run_batch(counted(), work, MemorySink(), BatchOptions(jobs=2)))
    assert len(ahead) == 10
    assert max(ahead) <= 2


def test_one_bad_document_among_five_ends_alone(tmp_path: Path) -> None:
    sources = write_documents(tmp_path, {"a": "1", "b": "2", "c": "bad", "d": "4", "e": "5"})
    sink = MemorySink()
    totals = asyncio.run(run_batch(sources, Work(), sink))
    assert sorted(sink.written) == ["a", "b", "d", "e"]
    assert sink.failures == [Failure(str(tmp_path / "c"), "corrupt_document", "c is cut off.")]
    assert totals == BatchTotals(num_done=4, num_failed=1)


def test_equal_contents_are_done_once_and_written_everywhere(tmp_path: Path) -> None:
    texts = {"a": "same", "b": "same", "c": "other", "d": "same"}
    work, sink = Work(), MemorySink()
    totals = asyncio.run(run_batch(write_documents(tmp_path, texts), work, sink, BatchOptions(jobs=4)))
    assert sink.written == {"a": "SAME", "b": "SAME", "c": "OTHER", "d": "SAME"}
    assert len(work.seen) == 2
    assert "c" in work.seen
    assert totals == BatchTotals(num_done=4, num_copied=2)


def test_a_copy_of_a_failed_document_is_tried_itself(tmp_path: Path) -> None:
    work, sink = Work(), MemorySink()
    sources = write_documents(tmp_path, {"a": "bad", "b": "bad"})
    asyncio.run(run_batch(sources, work, sink, BatchOptions(jobs=2)))
    assert sorted(work.seen) == ["a", "b"]
    assert sorted(failure.message for failure in sink.failures) == ["a is cut off.", "b is cut off."]


def test_what_is_done_already_is_skipped(tmp_path: Path) -> None:
    sources = write_documents(tmp_path, {"a": "1", "b": "2"})
    work, sink = Work(), MemorySink(done=frozenset({file_digest(tmp_path / "a")}))
    totals = asyncio.run(run_batch(sources, work, sink))
    assert work.seen == ["b"]
    assert totals == BatchTotals(num_done=1, num_skipped=1)


def test_a_document_that_takes_too_long_fails_with_timeout(tmp_path: Path) -> None:
    was_cancelled = []

    async def work(source: Source) -> Text:
        try:
            await asyncio.sleep(60 if source.name == "slow" else 0)
        except asyncio.CancelledError:
            was_cancelled.append(source.name)
            raise
        return Text(source.name)

    sink = MemorySink()
    sources = write_documents(tmp_path, {"slow": "1", "quick": "2"})
    asyncio.run(run_batch(sources, work, sink, BatchOptions(timeout=0.05)))
    assert sink.written == {"quick": "quick"}
    assert [(failure.path, failure.code) for failure in sink.failures] == [(str(tmp_path / "slow"), "timeout")]
    assert was_cancelled == ["slow"]


def test_fail_fast_stops_at_the_first_failure(tmp_path: Path) -> None:
    sources = write_documents(tmp_path, {"a": "1", "b": "bad", "c": "3", "d": "4"})
    sink = MemorySink()
    totals = asyncio.run(run_batch(sources, Work(), sink, BatchOptions(jobs=1, fail_fast=True)))
    assert list(sink.written) == ["a"]
    assert totals == BatchTotals(num_done=1, num_failed=1)


@pytest.mark.parametrize(
    "error",
    [
        SetupError("model_unavailable", "The model is not there."),
        EngineError("engine_dead", "The engine has died."),
        OSError(errno.ENOSPC, "No space left on device"),
        BrokenPipeError(errno.EPIPE, "Broken pipe"),
    ],
    ids=["setup", "engine", "disk", "pipe"],
)
def test_what_concerns_all_documents_ends_the_batch(tmp_path: Path, error: Exception) -> None:
    async def work(source: Source) -> Text:
        raise error

    sink = MemorySink()
    with pytest.raises(type(error)) as raised:
        asyncio.run(run_batch(write_documents(tmp_path, {"a": "1", "b": "2"}), work, sink))
    assert raised.value is error
    assert sink.failures == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineError("queue_full", "Too many requests wait."), "queue_full"),
        (PermissionError(errno.EACCES, "Permission denied", "/x/a"), "internal_error"),
        (ZeroDivisionError("division by zero"), "internal_error"),
        (TimeoutError("slow disk"), "internal_error"),
    ],
    ids=["queue", "permission", "bug", "other-timeout"],
)
def test_other_errors_end_their_document(tmp_path: Path, error: Exception, code: str) -> None:
    async def work(source: Source) -> Text:
        if source.name == "a":
            raise error
        return Text("fine")

    sink = MemorySink()
    asyncio.run(run_batch(write_documents(tmp_path, {"a": "1", "b": "2"}), work, sink, AT_ONCE))
    assert [(failure.path, failure.code) for failure in sink.failures] == [(str(tmp_path / "a"), code)]
    assert sink.written == {"b": "fine"}


@pytest.mark.parametrize(
    ("error", "num_tries"),
    [
        (EngineError("queue_full", "Too many requests wait."), 3),
        (EngineError("engine_not_ready", "The model is still being loaded."), 3),
        (DocumentError("timeout", "Reading it took more than 60 seconds."), 3),
        (OSError(errno.EIO, "Input/output error"), 3),
        (TimeoutError("slow disk"), 3),
        (DocumentError("corrupt_document", "It is cut off."), 1),
        (RequestError("timeout", "Not done within 5 seconds."), 1),
        (RequestError("context_length_exceeded", "It is too long."), 1),
        (PermissionError(errno.EACCES, "Permission denied"), 1),
        (FileNotFoundError(errno.ENOENT, "No such file"), 1),
        (ZeroDivisionError("division by zero"), 1),
    ],
)
def test_only_what_may_heal_is_tried_again(tmp_path: Path, error: Exception, num_tries: int) -> None:
    tries = []

    async def work(source: Source) -> Text:
        tries.append(source.name)
        raise error

    sink = MemorySink()
    totals = asyncio.run(run_batch(write_documents(tmp_path, {"a": "1"}), work, sink, AT_ONCE))
    assert tries == ["a"] * num_tries
    assert len(sink.failures) == 1
    assert totals == BatchTotals(num_failed=1)


def test_what_heals_is_done_and_no_failure(tmp_path: Path) -> None:
    tries = []

    async def work(source: Source) -> Text:
        tries.append(source.name)
        if len(tries) < 3:
            raise EngineError("queue_full", "Too many requests wait.")
        return Text("fine")

    sink = MemorySink()
    sources = write_documents(tmp_path, {"a": "1"})
    assert asyncio.run(run_batch(sources, work, sink, AT_ONCE)) == BatchTotals(num_done=1)
    assert (sink.written, sink.failures) == ({"a": "fine"}, [])
    tries.clear()
    totals = asyncio.run(run_batch(sources, work, sink, BatchOptions(first_delay=0.0, retries=1)))
    assert totals == BatchTotals(num_failed=1)


def test_who_is_overloaded_says_when_to_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    delays: list[float] = []

    async def note(delay: float) -> None:
        delays.append(delay)

    async def work(source: Source) -> Text:
        error = EngineError("queue_full", "Too many requests wait.")
        error.retry_after = 7.0 if not delays else None
        raise error

    monkeypatch.setattr("mmserve.pipelines.batch._sleep", note)
    asyncio.run(run_batch(write_documents(tmp_path, {"a": "1"}), work, MemorySink()))
    assert delays[0] == 7.0
    assert 1.0 <= delays[1] <= 1.5


def test_a_document_that_is_gone_or_known_to_be_unreadable_fails(tmp_path: Path) -> None:
    sink = MemorySink()
    sources = [Source(tmp_path / "gone", "gone"), Source(tmp_path / "x", "x", problem="Locked.", shown="the x")]
    asyncio.run(run_batch(sources, Work(), sink))
    assert [(failure.path, failure.code) for failure in sink.failures] == [
        ("the x", "invalid_request"),
        (str(tmp_path / "gone"), "not_found"),
    ]


def test_an_interruption_cancels_the_work_and_keeps_what_was_done(tmp_path: Path) -> None:
    sources = write_documents(tmp_path, {"a": "1", "b": "2", "c": "3"})
    sink, totals, ended = MemorySink(), BatchTotals(), []
    all_begun = asyncio.Event()

    async def work(source: Source) -> Text:
        if source.name == "a":
            return Text("done")
        if source.name == "c":
            all_begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(source.name)
        return Text("never")

    async def interrupted() -> None:
        task = asyncio.create_task(run_batch(sources, work, sink, BatchOptions(jobs=2), totals))
        await all_begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(interrupted())
    assert sink.written == {"a": "done"}
    assert totals.num_done == 1
    assert sorted(ended) == ["b", "c"]


class CountingSink(MemorySink):
    """Keeps nothing, as files on a disk would not."""

    def write(self, source: Source, digest: str, result: Text) -> None:
        pass


def peak_bytes(folder: Path, num_documents: int) -> int:
    """Peak memory of a batch over many documents, each of which gives a result of 20 kB."""

    def sources() -> Iterator[Source]:
        for i in range(num_documents):
            path = folder / "document"
            path.write_text(f"{i}")
            yield Source(path, f"{i}")

    async def work(source: Source) -> Text:
        return Text(source.name.ljust(20_000))

    gc.collect()
    tracemalloc.start()
    try:
        totals = asyncio.run(run_batch(sources(), work, CountingSink(), BatchOptions(jobs=1)))
        assert totals.num_done == num_documents
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_number_of_documents(tmp_path: Path) -> None:
    peak_bytes(tmp_path, 2)
    few, many = peak_bytes(tmp_path, 10), peak_bytes(tmp_path, 1000)
    assert many - few < 1_000_000, (few, many)


def test_options_are_checked() -> None:
    with pytest.raises(RequestError, match="--jobs"):
        BatchOptions(jobs=0)
    with pytest.raises(RequestError, match="--retries"):
        BatchOptions(retries=-1)
    with pytest.raises(RequestError, match="--timeout"):
        BatchOptions(timeout=0.0)


def test_a_failure_as_a_line_of_the_report() -> None:
    failure = Failure("a.pdf", "corrupt_document", "It is cut off.")
    assert failure.to_dict() == {"path": "a.pdf", "code": "corrupt_document", "message": "It is cut off."}
    assert Failure("a.pdf", "timeout", "Slow.", page=3).to_dict()["page"] == 3


def test_a_name_that_is_not_text_can_be_shown() -> None:
    assert displayable(Path(b"caf\xe9.pdf".decode("utf-8", "surrogateescape"))) == "caf\\xe9.pdf"
    assert displayable(Path("café.pdf")) == "café.pdf"
