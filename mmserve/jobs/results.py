"""Results by what decides them: the bytes, the task, its options and the model. Each owner has its own."""

from dataclasses import dataclass
from typing import Any, Self

from sqlalchemy import ColumnElement, Connection, and_, select

import mmserve
from mmserve.jobs.database import Database
from mmserve.jobs.digests import digest_of
from mmserve.jobs.tables import files, results
from mmserve.jobs.upserts import put_row
from mmserve.pipelines.task_options import TaskOptions
from mmserve.pipelines.tasks import TaskName


@dataclass(frozen=True)
class ResultKey:
    """The file's own name is no part of it."""

    sha256: str
    digest: str

    @classmethod
    def of(cls, sha256: str, task: TaskName, options: TaskOptions, model: str) -> Self:
        """`model` is all about the server that may change an answer: weights, precision, how pages are read."""
        return cls(sha256, digest_of(mmserve.__version__, sha256, task, options, model))


class ResultCache:
    """Results are kept for `retention_seconds` from when they were made."""

    def __init__(self, database: Database, retention_seconds: float) -> None:
        self._database = database
        self._retention_seconds = retention_seconds

    async def get(self, owner: str, key: ResultKey, *, name: str) -> dict[str, Any] | None:
        """A result, as if the document were called `name`, with `cached` true."""

        def find(connection: Connection) -> dict[str, Any] | None:
            is_fresh = results.c.expires_at > self._database.now()
            found: dict[str, Any] | None = connection.execute(
                select(results.c.result).where(_is(owner, key), is_fresh)
            ).scalar_one_or_none()
            return found

        result = await self._database.read(find)
        return None if result is None else {**result, "name": name, "cached": True}

    async def put(self, owner: str, key: ResultKey, result: dict[str, Any], *, is_of_file: bool = False) -> None:
        """Keeps a result, unless a page of it could not be read: that may go better the next time.

        One of a stored file only while the owner has it.
        """

        def keep(connection: Connection) -> None:
            if not is_of_file or is_kept(connection, owner, key.sha256):
                self.put_within(connection, owner, key, result)

        await self._database.write(keep)

    def put_within(self, connection: Connection, owner: str, key: ResultKey, result: dict[str, Any]) -> None:
        if any(page.get("problem") for page in result.get("pages", ())):
            return
        row = {
            "owner": owner,
            "digest": key.digest,
            "sha256": key.sha256,
            "result": {name: value for name, value in result.items() if name != "cached"},
            "expires_at": self._database.now() + self._retention_seconds,
        }
        put_row(connection, results, row)


def is_kept(connection: Connection, owner: str, sha256: str) -> bool:
    """Whether the owner still has a file of these bytes; it stays until the transaction's end.

    What is made of a file in the background must not come back after the file was deleted.
    """
    query = select(files.c.id).where(files.c.owner == owner, files.c.sha256 == sha256).limit(1)
    return connection.execute(query.with_for_update(read=True)).first() is not None


def _is(owner: str, key: ResultKey) -> ColumnElement[bool]:
    return and_(results.c.owner == owner, results.c.digest == key.digest)
