"""Page and preprocessing workers that are killed, or cannot start."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from document_makers import draw_nothing, draw_pdf, write
from dying_preprocess_workers import start_mortal_preprocess_worker
from dying_workers import Mortal, start_at_the_second_try, start_never
from PIL import Image
from test_preprocess_pool import PROCESSOR, SHARED_MEMORY, segments

from mmserve.errors import DocumentError, SetupError
from mmserve.vision.image_source import ImageSource, PixelLimits
from mmserve.vision.page_types import Document, Page, PageLimits, PageOptions
from mmserve.vision.pages import PageReader
from mmserve.vision.preprocess_pool import PreprocessPool
from mmserve.vision.worker_pool import WorkerEntry, WorkerPool


def pool_of(start: Any, *arguments: Any, num_workers: int = 1) -> WorkerPool:
    return WorkerPool(num_workers, PageLimits(), PageOptions(ocr="off"), lambda: WorkerEntry(start, arguments))


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[PageReader]:
    """One whose workers die on page 2 once, and on page 3 each time."""
    made = PageReader(options=PageOptions(ocr="off"), num_workers=1)
    made._pool = pool_of(Mortal, tmp_path / "flag", (2, 3))
    with closing(made):
        yield made


def test_a_page_is_tried_again_where_its_worker_was_killed_and_then_reported(
    reader: PageReader, tmp_path: Path
) -> None:
    async def read() -> list[Page]:
        document = await reader.open(write(tmp_path, "a.pdf", draw_pdf(draw_nothing)))
        return [page async for page in reader.pages(document)]

    one, two, three, four = asyncio.run(read())
    assert [page.text for page in (one, two, four)] == ["page 1", "page 2", "page 4"]
    assert three.problem is not None
    assert three.problem.code == "corrupt_document"
    assert "page 3 of a.pdf" in three.problem.message


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_killed_while_they_are_idle_are_replaced(tmp_path: Path, num_workers: int) -> None:
    async def scenario() -> None:
        for _ in range(2):
            pid = await pool.call("process_id", timeout=30)
            os.kill(pid, signal.SIGKILL)
            assert await pool.call("process_id", timeout=30) != pid

    before = set(psutil.Process().children())
    with closing(pool_of(Mortal, tmp_path / "flag", (), num_workers=num_workers)) as pool:
        asyncio.run(scenario())
    left = [child for child in set(psutil.Process().children()) - before if "spawn_main" in " ".join(child.cmdline())]
    _, alive = psutil.wait_procs(left, timeout=20)
    assert alive == [], "a pool that was given up leaves no process behind"


def test_a_worker_that_starts_at_the_second_try_is_used(tmp_path: Path) -> None:
    with closing(pool_of(start_at_the_second_try, tmp_path / "flag")) as pool:
        assert asyncio.run(pool.call("process_id", timeout=30)) > 0


def test_workers_that_cannot_start_are_the_servers_fault(reader: PageReader, tmp_path: Path) -> None:
    reader._pool.close()
    reader._pool = pool_of(start_never)
    path = write(tmp_path, "a.pdf", draw_pdf(draw_nothing))
    document = Document(path, "a.pdf", "application/pdf", "0" * 64, 1)

    async def pages() -> list[Page]:
        return [page async for page in reader.pages(document)]

    for work in (reader.open(path), pages()):
        with pytest.raises(SetupError, match="cannot be started") as caught:
            asyncio.run(work)
        assert caught.value.http_status >= 500


def test_what_a_killed_worker_had_shared_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flag = tmp_path / "flag"
    entry = WorkerEntry(start_mortal_preprocess_worker, (flag, PROCESSOR))
    monkeypatch.setattr(PreprocessPool, "_entry_point", lambda _pool: entry)
    path = tmp_path / "a.png"
    Image.new("RGB", (300, 200), 255).save(path)
    document = Document(path, "a.png", "image/png", "0" * 64, 1)

    async def scenario() -> None:
        planned = await pool.plan(ImageSource(document, 1), PixelLimits())
        async with pool.hold([planned]) as (processed,):
            lost = flag.read_text()
            assert lost not in segments([processed])
            assert not (SHARED_MEMORY / lost).exists()
            assert len(segments([processed])) == 1

    with closing(PreprocessPool(PROCESSOR, num_workers=1)) as pool:
        asyncio.run(scenario())
        assert pool.num_bytes > 0
    assert not list(SHARED_MEMORY.glob(f"{pool._mark}-*"))


def test_a_picture_that_kills_its_worker_each_time_is_reported(tmp_path: Path) -> None:
    with closing(pool_of(Mortal, tmp_path / "flag", (0, 1))) as pool, pytest.raises(DocumentError, match="crash"):
        asyncio.run(pool.call("read_page", None, 1, timeout=30))
