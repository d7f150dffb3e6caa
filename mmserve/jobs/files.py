"""Files that were sent, on disk under names of our choice, each readable by its owner alone."""

import asyncio
import builtins
import contextlib
import hashlib
import logging
import os
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Row, delete, func, insert, select

from mmserve.errors import DocumentError, RequestError, StorageError
from mmserve.jobs.database import Database, newest
from mmserve.jobs.ids import new_id, not_found, require_cursor, require_id
from mmserve.jobs.records import UNFINISHED, StoredFile
from mmserve.jobs.storage_errors import storing
from mmserve.jobs.tables import files, job_files, jobs, page_texts, results

_log = logging.getLogger(__name__)
# A folder without a row is one that is being filled, or was left by a server that ended too early.
_ORPHAN_SECONDS = 600.0
# Pictures of one page.
_MAX_WIDTHS = 8


class FileStore:
    """Under `root` there is a folder for each owner, in it one for each file: `content`, and `pages` drawn of it.

    A file is kept for `retention_seconds`, and longer while a job needs it; those of one owner take
    `max_bytes_of_owner` at most.
    """

    def __init__(self, root: Path, database: Database, *, retention_seconds: float, max_bytes_of_owner: int) -> None:
        self._root = root
        self._database = database
        self._retention_seconds = retention_seconds
        self._max_bytes_of_owner = max_bytes_of_owner

    async def add(
        self, owner: str, source: Path, *, filename: str, media_type: str, num_pages: int, sha256: str
    ) -> StoredFile:
        """Keeps a copy of `source`: whole, or not at all. Raises `StorageError`."""
        now = self._database.now()
        file_id = new_id("file", now)
        folder = self._folder(owner, file_id)
        num_bytes = await asyncio.to_thread(_fill, folder, source)
        row: dict[str, Any] = {
            "id": file_id,
            "owner": owner,
            "filename": filename,
            "media_type": media_type,
            "num_pages": num_pages,
            "sha256": sha256,
            "num_bytes": num_bytes,
            "created_at": now,
            "expires_at": now + self._retention_seconds,
        }
        try:
            # Who is cancelled here leaves a file that nobody knows of, but never a row without its bytes.
            await asyncio.shield(self._database.write(lambda connection: self._insert(connection, row)))
        except Exception:
            await asyncio.to_thread(_remove, folder)
            raise
        return StoredFile(**row, folder=folder)

    def _insert(self, connection: Connection, row: dict[str, Any]) -> None:
        query = select(func.coalesce(func.sum(files.c.num_bytes), 0)).where(files.c.owner == row["owner"])
        if connection.execute(query).scalar_one() + row["num_bytes"] > self._max_bytes_of_owner:
            raise StorageError(
                "storage_full",
                f"Your files may take {self._max_bytes_of_owner / 2**20:,.0f} MiB, and this one does not fit beside "
                "those that you have: delete some, or wait until they expire.",
            )
        connection.execute(insert(files), row)

    async def get(self, owner: str, file_id: str) -> StoredFile:
        """Raises `RequestError` (`not_found`)."""
        require_id("file", file_id)

        def find(connection: Connection) -> Row[Any] | None:
            return connection.execute(select(files).where(files.c.owner == owner, files.c.id == file_id)).one_or_none()

        row = await self._database.read(find)
        if row is None:
            raise not_found("file")
        return self._stored(row)

    async def list(self, owner: str, *, limit: int = 20, after: str | None = None) -> tuple[Sequence[StoredFile], bool]:
        """The newest first, those older than the file `after`; and whether there are more."""
        cursor = require_cursor(after)
        rows, has_more = await self._database.read(
            lambda connection: newest(connection, files, files.c.owner == owner, limit=limit, after=cursor)
        )
        return [self._stored(row) for row in rows], has_more

    async def delete(self, owner: str, file_id: str) -> None:
        """Removes its bytes, what was drawn and read of them, and the owner's cached results of equal bytes.

        Raises `RequestError` (`not_found`).
        """
        require_id("file", file_id)

        def forget(connection: Connection) -> None:
            is_file = (files.c.owner == owner) & (files.c.id == file_id)
            sha256 = connection.execute(delete(files).where(is_file).returning(files.c.sha256)).scalar_one_or_none()
            if sha256 is None:
                raise not_found("file")
            for table in (page_texts, results):
                connection.execute(delete(table).where(table.c.owner == owner, table.c.sha256 == sha256))

        await self._database.write(forget)
        await asyncio.to_thread(_remove, self._folder(owner, file_id))

    async def page_picture(
        self, file: StoredFile, number: int, width: int, draw: Callable[[], Awaitable[bytes]]
    ) -> bytes:
        """The picture of a page at `width` pixels, drawn once and then kept with the file, if there is room.

        A few widths of a page are kept: whoever asks for every one shall not fill the disk.
        """
        path = file.folder / "pages" / f"{int(number)}-{int(width)}.png"
        with contextlib.suppress(FileNotFoundError):
            return await asyncio.to_thread(path.read_bytes)
        picture = await draw()
        try:
            await asyncio.to_thread(_keep, path, picture)
        except StorageError as error:
            _log.warning("a page's picture is not kept: %s", error.__cause__)
        return picture

    async def sweep(self) -> None:
        """Removes files whose time has come, and folders that belong to none."""

        def forget(connection: Connection) -> builtins.list[tuple[str, str]]:
            is_needed = (
                select(job_files.c.file_id)
                .join(jobs, jobs.c.id == job_files.c.job_id)
                .where(job_files.c.file_id == files.c.id, jobs.c.status.in_(UNFINISHED))
                .exists()
            )
            has_expired = files.c.expires_at <= self._database.now()
            query = delete(files).where(has_expired, ~is_needed).returning(files.c.owner, files.c.id)
            return [(row.owner, row.id) for row in connection.execute(query)]

        for owner, file_id in await self._database.write(forget):
            await asyncio.to_thread(_remove, self._folder(owner, file_id))
        await self._remove_orphans()

    async def _remove_orphans(self) -> None:
        def known(connection: Connection) -> set[str]:
            return set(connection.execute(select(files.c.id)).scalars())

        # Looked for before the rows are read: a folder that is filled meanwhile is not among them.
        folders = await asyncio.to_thread(lambda: list(_old_folders(self._root)))
        file_ids = await self._database.read(known) if folders else set()
        for folder in folders:
            if folder.name not in file_ids:
                await asyncio.to_thread(_remove, folder)

    def _folder(self, owner: str, file_id: str) -> Path:
        return self._root / hashlib.sha256(owner.encode()).hexdigest()[:32] / file_id

    def _stored(self, row: Row[Any]) -> StoredFile:
        return StoredFile(**row._mapping, folder=self._folder(row.owner, row.id))


@contextlib.contextmanager
def while_kept(path: Path) -> Iterator[None]:
    """What goes wrong with a file because it was deleted meanwhile is that it is not there (`not_found`)."""
    try:
        yield
    except (DocumentError, RequestError, OSError):
        if path.exists():
            raise
        raise not_found("file") from None


def _fill(folder: Path, source: Path) -> int:
    """Number of bytes. The folder appears under its name when it has them all."""
    unfinished = folder.with_name(f".{folder.name}")
    with storing("The file"):
        try:
            for place in (folder.parent.parent, folder.parent, unfinished):
                place.mkdir(mode=0o700, exist_ok=True)
            num_bytes = _copy(source, unfinished / "content")
            unfinished.rename(folder)
        except BaseException:
            _remove(unfinished)
            raise
    return num_bytes


def _copy(source: Path, target: Path) -> int:
    with source.open("rb") as reading, open(target, "xb", opener=_private) as writing:
        shutil.copyfileobj(reading, writing, length=1024 * 1024)
        writing.flush()
        os.fsync(writing.fileno())
        return writing.tell()


def _keep(path: Path, content: bytes) -> None:
    unfinished = path.with_name(f".{secrets.token_hex(8)}")
    with storing("The picture"):
        # The folder above belongs to the file: it must not come back after it was removed.
        path.parent.mkdir(mode=0o700, exist_ok=True)
        page, _, _ = path.name.partition("-")
        if len(list(path.parent.glob(f"{page}-*"))) >= _MAX_WIDTHS:
            return
        try:
            with open(unfinished, "xb", opener=_private) as writing:
                writing.write(content)
            unfinished.rename(path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _remove(folder: Path) -> None:
    """What cannot be removed now is an orphan, which a later sweep finds."""
    shutil.rmtree(folder, ignore_errors=True)


def _old_folders(root: Path) -> Iterator[Path]:
    newest_kept = time.time() - _ORPHAN_SECONDS
    for folder in root.glob("*/*"):
        with contextlib.suppress(FileNotFoundError):
            if folder.stat().st_mtime < newest_kept:
                yield folder
