"""Documents -> pages of text, lazily, in worker processes."""

import asyncio
import hashlib
import itertools
import re
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from mmserve.errors import DocumentError, RequestError
from mmserve.vision.ocr import choose_engine
from mmserve.vision.page_markdown import escaped_lines
from mmserve.vision.page_types import Document, Page, PageForm, PageLimits, PageOptions
from mmserve.vision.poppler import check_poppler
from mmserve.vision.sniff import TEXT_TYPE, media_type_of
from mmserve.vision.text_file import read_text_pages, text_page
from mmserve.vision.worker_pool import WorkerPool

__all__ = [
    "Document",
    "Page",
    "PageLimits",
    "PageOptions",
    "PageReader",
    "parse_page_selection",
]

_BATCH_PAGES = 16
_RANGE = re.compile(r"(\d{0,9})(-?)(\d{0,9})")


class PageReader:
    """Reads documents. Its processes start when a file first needs one; `close` ends them.

    Raises `SetupError` (`missing_dependency`) where `options` name a program that is not installed.
    """

    def __init__(
        self, *, limits: PageLimits | None = None, options: PageOptions | None = None, num_workers: int = 2
    ) -> None:
        self.limits = limits or PageLimits()
        self.options = options or PageOptions()
        if num_workers < 1:
            raise RequestError("invalid_request", "the number of page workers must be at least 1", param="num_workers")
        choose_engine(self.options.ocr)
        if self.options.renderer == "poppler":
            check_poppler()
        self._num_workers = num_workers
        self._pool = WorkerPool(num_workers, self.limits, self.options)

    async def open(self, path: Path, *, name: str | None = None) -> Document:
        """What the file is, and how many pages it has.

        Raises `DocumentError`: `unsupported_type`, `empty_document`, `corrupt_document`, `password_required`,
        `body_too_large`, `too_many_pages`, `page_too_large`, `page_timeout`.
        """
        name = name or path.name
        document = await asyncio.to_thread(self._identify, path, name)
        if document.media_type == TEXT_TYPE:
            return document
        try:
            opened = await self._pool.call(
                "open", document.path, name, document.media_type, timeout=self.limits.page_timeout
            )
        except DocumentError as error:
            raise error.about(name) from None
        return replace(document, num_pages=opened.num_pages, attachments=opened.attachments, notes=opened.notes)

    async def pages(
        self, document: Document, selection: Sequence[int] | None = None, *, form: PageForm = "text"
    ) -> AsyncGenerator[Page]:
        """Pages in the order of `selection` (1-based numbers, all by default), a few read ahead.

        A page that cannot be read comes as a `Page` with its `problem`; the rest still come.
        """
        numbers = list(selection) if selection is not None else list(range(1, document.num_pages + 1))
        for number in numbers:
            if not 1 <= number <= document.num_pages:
                raise _no_such_page(number, document.num_pages)
        if document.media_type == TEXT_TYPE:
            texts = await asyncio.to_thread(read_text_pages, document.path, document.name)
            for number in numbers:
                page = text_page(number, texts[number - 1])
                yield replace(page, markdown=escaped_lines(page.text)) if form == "markdown" else page
            return
        reading = _Reading(self._pool, document, numbers, form, self.limits.page_timeout)
        ahead: deque[asyncio.Task[Page]] = deque()
        rest = iter(range(len(numbers)))
        try:
            for index in itertools.islice(rest, 2 * self._num_workers):
                ahead.append(asyncio.create_task(reading.page(index)))
            while ahead:
                page = await ahead.popleft()
                ahead.extend(asyncio.create_task(reading.page(index)) for index in itertools.islice(rest, 1))
                yield page
        finally:
            for task in ahead:
                task.cancel()
            reading.cancel()

    async def draw(self, document: Document, number: int, width: int) -> bytes:
        """Page `number` (from 1) as a PNG for a person to look at, `width` pixels wide or less.

        Raises `RequestError` for a page that is not there, `DocumentError` for one that cannot be drawn, as all of a
        text file (`unsupported_type`).
        """
        if not 1 <= number <= document.num_pages:
            raise _no_such_page(number, document.num_pages)
        if document.media_type == TEXT_TYPE:
            raise DocumentError("unsupported_type", f"{document.name} is text: it has no pictures of pages")
        try:
            drawn: bytes = await self._pool.call("draw_page", document, number, width, timeout=self.limits.page_timeout)
        except DocumentError as error:
            raise error.about(f"page {number} of {document.name}") from None
        return drawn

    def close(self) -> None:
        self._pool.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    def _identify(self, path: Path, name: str) -> Document:
        """Type and digest of a file, and for text its pages."""
        try:
            path = path.resolve()
            size = path.stat().st_size
            if size > self.limits.max_bytes:
                raise DocumentError(
                    "body_too_large", f"{name} has {size:,} bytes; at most {self.limits.max_bytes:,} are read"
                )
            media_type = media_type_of(path, name)
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            num_pages = len(read_text_pages(path, name)) if media_type == TEXT_TYPE else 0
        except OSError as error:
            raise DocumentError("invalid_request", f"{name} cannot be read: {error.strerror}") from None
        if num_pages > self.limits.max_pages:
            raise DocumentError(
                "too_many_pages", f"{name} has {num_pages} pages; at most {self.limits.max_pages} are read"
            )
        return Document(path, name, media_type, digest, num_pages)


class _Reading:
    """One pass over a document: text layers are read a batch at a time, pages that need OCR one at a time."""

    def __init__(
        self, pool: WorkerPool, document: Document, numbers: list[int], form: PageForm, timeout: float
    ) -> None:
        self._pool = pool
        self._document = document
        self._numbers = numbers
        self._form = form
        self._timeout = timeout
        self._batches: dict[int, asyncio.Task[list[Page | None]]] = {}

    async def page(self, index: int) -> Page:
        """The page at `index` of the selection."""
        batch, offset = divmod(index, _BATCH_PAGES)
        for old in [key for key in self._batches if key < batch - 1]:
            del self._batches[old]
        if batch not in self._batches:
            self._batches[batch] = asyncio.create_task(self._read_batch(batch))
        page = (await asyncio.shield(self._batches[batch]))[offset]
        return page or await self._read_alone(self._numbers[index])

    def cancel(self) -> None:
        for task in self._batches.values():
            task.cancel()

    async def _read_batch(self, batch: int) -> list[Page | None]:
        """What a batch gives without OCR; a batch that fails as a whole is left to be read page by page."""
        numbers = self._numbers[batch * _BATCH_PAGES : (batch + 1) * _BATCH_PAGES]
        try:
            pages: list[Page | None] = await self._pool.call(
                "read_without_ocr", self._document, numbers, self._form, timeout=self._timeout, attempts=1
            )
        except DocumentError:
            return [None] * len(numbers)
        return pages

    async def _read_alone(self, number: int) -> Page:
        try:
            page: Page = await self._pool.call("read_page", self._document, number, self._form, timeout=self._timeout)
        except DocumentError as error:
            return Page(number, problem=error.about(f"page {number} of {self._document.name}"))
        return page


def parse_page_selection(text: str, num_pages: int) -> list[int]:
    """`1-4,7,10-` (1-based, ends included) -> page numbers in that order, each once.

    A range that ends beyond the document ends with it. Raises `RequestError` (`invalid_request`) for what is no such
    list, and for a part that names no page of the document.
    """
    numbers: dict[int, None] = {}
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None or not (match[1] or match[3]) or (match[3] and not match[2]):
            raise RequestError("invalid_request", f"{text!r} is no list of pages: write 1-4,7,10-", param="pages")
        first = int(match[1] or 1)
        last = int(match[3] or max(num_pages, first)) if match[2] else first
        if first > last:
            raise RequestError("invalid_request", f"{part.strip()!r} runs backwards", param="pages")
        if not 1 <= first <= num_pages:
            raise _no_such_page(first, num_pages)
        numbers.update(dict.fromkeys(range(first, min(last, num_pages) + 1)))
    return list(numbers)


def _no_such_page(number: int, num_pages: int) -> RequestError:
    pages = "1 page" if num_pages == 1 else f"{num_pages} pages"
    return RequestError("invalid_request", f"there is no page {number}: the document has {pages}", param="pages")
