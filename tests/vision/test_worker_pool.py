import asyncio
import logging
from pathlib import Path

import psutil
import pytest
from document_makers import draw_nothing, draw_pdf, write

from mmserve.errors import DocumentError, MMServeError
from mmserve.vision.page_types import Document, PageLimits, PageOptions
from mmserve.vision.pages import PageReader
from mmserve.vision.worker_pool import WorkerPool


def test_an_unforeseen_failure_becomes_a_sentence(reader: PageReader, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR), pytest.raises(DocumentError) as caught:
        asyncio.run(reader._pool.call("no_such_method", timeout=30))
    assert caught.value.code == "corrupt_document"
    assert "AttributeError" in caught.value.message
    assert "no_such_method" in caplog.text


def test_closing_fails_what_is_under_way_and_ends_the_processes(tmp_path: Path) -> None:
    path = write(tmp_path, "a.pdf", draw_pdf(draw_nothing))
    document = Document(path, "a.pdf", "application/pdf", "0" * 64, 1)
    before = set(psutil.Process().children())

    async def close_early() -> tuple[object, int]:
        pool = WorkerPool(1, PageLimits(), PageOptions())
        call = asyncio.create_task(pool.call("read_page", document, 1, timeout=30))
        await asyncio.sleep(0.05)
        num_started = len(set(psutil.Process().children()) - before)
        await asyncio.to_thread(pool.close)
        outcomes = await asyncio.gather(call, return_exceptions=True)
        return outcomes[0], num_started

    outcome, num_started = asyncio.run(close_early())
    assert isinstance(outcome, MMServeError)
    assert outcome.code == "shutting_down"
    assert num_started >= 1
    left = [child for child in set(psutil.Process().children()) - before if "spawn_main" in " ".join(child.cmdline())]
    assert left == []


def test_a_caller_who_leaves_is_cancelled_and_not_failed(reader: PageReader, tmp_path: Path) -> None:
    path = write(tmp_path, "a.pdf", draw_pdf(draw_nothing))

    async def leave() -> object:
        call = asyncio.create_task(reader._pool.call("open", path, "a.pdf", "application/pdf", timeout=30))
        await asyncio.sleep(0)
        call.cancel()
        outcomes = await asyncio.gather(call, return_exceptions=True)
        return outcomes[0]

    assert isinstance(asyncio.run(leave()), asyncio.CancelledError)
