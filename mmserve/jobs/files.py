"""Files that were sent, on disk under names of our choice, each readable by its owner alone."""

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from mmserve.jobs.records import StoredFile


class FileStore:
    async def add(
        self, owner: str, source: Path, *, filename: str, media_type: str, num_pages: int, sha256: str
    ) -> StoredFile:
        """Keeps a copy of `source`. Raises `StorageError`."""
        raise NotImplementedError

    async def get(self, owner: str, file_id: str) -> StoredFile:
        """Raises `RequestError` (`not_found`)."""
        raise NotImplementedError

    async def list(self, owner: str, *, limit: int = 20, after: str | None = None) -> tuple[Sequence[StoredFile], bool]:
        """The newest first, those older than the file `after`; and whether there are more."""
        raise NotImplementedError

    async def delete(self, owner: str, file_id: str) -> None:
        """Removes its bytes, what was drawn and read of them, and the owner's cached results of equal bytes.

        Raises `RequestError` (`not_found`).
        """
        raise NotImplementedError

    async def page_picture(
        self, file: StoredFile, number: int, width: int, draw: Callable[[], Awaitable[bytes]]
    ) -> bytes:
        """The picture of a page at `width` pixels, drawn once and then kept with the file."""
        raise NotImplementedError
