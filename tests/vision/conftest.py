"""Readers that tests share: OCR is loaded once."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mmserve.vision.ocr import OcrEngine, load_engine
from mmserve.vision.page_types import Document, Page, PageLimits, PageOptions
from mmserve.vision.page_workers import PageWorker
from mmserve.vision.pages import PageReader


@pytest.fixture(scope="session")
def ocr_engine() -> OcrEngine:
    return load_engine("rapidocr", num_threads=1, timeout=60)


@pytest.fixture
def worker(ocr_engine: OcrEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[PageWorker]:
    """A worker in this process."""
    monkeypatch.setattr("mmserve.vision.page_workers.load_engine", lambda name, num_threads, timeout: ocr_engine)
    page_worker = PageWorker(PageLimits(), PageOptions(), 1)
    yield page_worker
    page_worker.close()


@pytest.fixture
def read(worker: PageWorker) -> Callable[..., list[Page]]:
    """All pages of a file, as the worker reads them."""
    return lambda path, media_type="application/pdf": read_pages(worker, path, media_type)


@pytest.fixture
def read_without_ocr() -> Iterator[Callable[..., list[Page]]]:
    page_worker = PageWorker(PageLimits(), PageOptions(ocr="off"), 1)
    yield lambda path, media_type="application/pdf": read_pages(page_worker, path, media_type)
    page_worker.close()


@pytest.fixture(scope="session")
def reader() -> Iterator[PageReader]:
    """A reader with one real worker process."""
    with_processes = PageReader(num_workers=1)
    yield with_processes
    with_processes.close()


def read_pages(worker: PageWorker, path: Path, media_type: str) -> list[Page]:
    opened = worker.open(path, path.name, media_type)
    document = Document(path, path.name, media_type, "0" * 64, opened.num_pages)
    return [worker.read_page(document, number) for number in range(1, opened.num_pages + 1)]


@pytest.fixture
def collect(reader: PageReader) -> Callable[[Path], list[Page]]:
    """All pages of a file, through processes."""

    async def pages(path: Path) -> list[Page]:
        document = await reader.open(path)
        return [page async for page in reader.pages(document)]

    return lambda path: asyncio.run(pages(path))
