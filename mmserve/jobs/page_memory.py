"""Pages that were read are remembered, so that work which starts again does not read them again."""

import dataclasses
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sqlalchemy import Connection, select

import mmserve
from mmserve.jobs.database import Database
from mmserve.jobs.digests import digest_of
from mmserve.jobs.results import is_kept
from mmserve.jobs.tables import page_texts
from mmserve.jobs.upserts import put_row
from mmserve.pipelines.document import DocumentReader
from mmserve.vision.page_types import Document, Page, PageForm, PageOptions

_BATCH_PAGES = 64


class PageSource(DocumentReader, Protocol):
    """What is asked of `vision.pages.PageReader`."""

    @property
    def options(self) -> PageOptions: ...

    def pages(
        self, document: Document, selection: Sequence[int] | None = None, *, form: PageForm = "text"
    ) -> AsyncGenerator[Page, None]: ...


class RememberingReader:
    """A `DocumentReader` for one owner's stored files.

    A page with a problem is not remembered: it may be read the next time.
    """

    def __init__(self, reader: PageSource, database: Database, owner: str, retention_seconds: float) -> None:
        self._reader = reader
        self._database = database
        self._owner = owner
        self._retention_seconds = retention_seconds

    async def open(self, path: Path, *, name: str | None = None) -> Document:
        return await self._reader.open(path, name=name)

    async def pages(
        self, document: Document, selection: Sequence[int] | None = None, *, form: PageForm = "text"
    ) -> AsyncGenerator[Page, None]:
        """As the reader gives them, in order."""
        numbers = list(selection) if selection is not None else list(range(1, document.num_pages + 1))
        kept = _Kept(document.sha256, digest_of(mmserve.__version__, self._reader.options, form))
        remembered = await self._database.read(lambda connection: self._numbers(connection, kept))
        missing = [number for number in numbers if number not in remembered]
        async with aclosing(self._reader.pages(document, missing, form=form)) as read:
            for start in range(0, len(numbers), _BATCH_PAGES):
                batch = numbers[start : start + _BATCH_PAGES]
                known = await self._recall(kept, [number for number in batch if number in remembered])
                for number in batch:
                    if number not in remembered:
                        yield await self._next_read(kept, read)
                    else:
                        yield known.get(number) or await self._read_alone(document, number, form)

    async def _next_read(self, kept: "_Kept", read: AsyncGenerator[Page, None]) -> Page:
        page = await anext(read)
        if page.problem is None:
            await self._database.write(lambda connection: self._remember(connection, kept, page))
        return page

    async def _read_alone(self, document: Document, number: int, form: PageForm) -> Page:
        """A page that was forgotten since this reading began."""
        async with aclosing(self._reader.pages(document, [number], form=form)) as read:
            return await anext(read)

    async def _recall(self, kept: "_Kept", numbers: Sequence[int]) -> Mapping[int, Page]:
        if not numbers:
            return {}
        query = select(page_texts.c.page).where(*self._is_of(kept), page_texts.c.number.in_(numbers))
        stored = await self._database.read(lambda connection: connection.execute(query).scalars().all())
        return {page.number: page for page in map(_from_json, stored)}

    def _numbers(self, connection: Connection, kept: "_Kept") -> set[int]:
        return set(connection.execute(select(page_texts.c.number).where(*self._is_of(kept))).scalars())

    def _remember(self, connection: Connection, kept: "_Kept", page: Page) -> None:
        if not is_kept(connection, self._owner, kept.sha256):
            return
        row = {
            "owner": self._owner,
            "sha256": kept.sha256,
            "reading": kept.reading,
            "number": page.number,
            "page": _to_json(page),
            "expires_at": self._database.now() + self._retention_seconds,
        }
        put_row(connection, page_texts, row)

    def _is_of(self, kept: "_Kept") -> tuple[Any, ...]:
        columns = page_texts.c
        return columns.owner == self._owner, columns.sha256 == kept.sha256, columns.reading == kept.reading


@dataclass(frozen=True)
class _Kept:
    """Where a document's pages are kept: `reading` is a digest of how they are read, and as what."""

    sha256: str
    reading: str


def _to_json(page: Page) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(page).items() if name != "problem"}


def _from_json(stored: dict[str, Any]) -> Page:
    return Page(**{**stored, "notes": tuple(stored["notes"])})
