"""The database behind files and jobs: SQLite or PostgreSQL, one transaction in a thread at a time of asking."""

import asyncio
import contextlib
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import URL, ColumnElement, Connection, Engine, Row, Table, create_engine, event, make_url, select, text
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

from mmserve.errors import RequestError, SetupError
from mmserve.jobs.storage_errors import from_database, storing

T = TypeVar("T")
MIGRATIONS = Path(__file__).with_name("migrations")
_log = logging.getLogger(__name__)

_NUM_THREADS = 4
_BUSY_SECONDS = 5.0
_BUSY_PAUSE = 0.01
# Any number will do, as long as all servers take the same.
_MIGRATION_LOCK = 7_215_034


class Database:
    """Raises `StorageError` where it cannot be used, `SetupError` where its driver is missing."""

    def __init__(self, url: str, *, clock: Callable[[], float] = time.time) -> None:
        self.now = clock
        self._engine = _make_engine(url)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="mmserve-database")
        # SQLite has one writer; who waits here does not use up the time for which it may be busy with another process.
        self._writing = threading.Lock() if self.is_sqlite else contextlib.nullcontext()

    @property
    def is_sqlite(self) -> bool:
        return self._engine.dialect.name == "sqlite"

    async def read(self, work: Callable[[Connection], T]) -> T:
        return await self._in_thread(lambda: self._transact(work, writes=False))

    async def write(self, work: Callable[[Connection], T]) -> T:
        """`work` happens as a whole or not at all."""
        return await self._in_thread(lambda: self._transact(work, writes=True))

    async def migrate(self) -> None:
        """Brings the tables up to date. Two servers may do so at once."""
        await self._in_thread(self._create_file)
        await self.write(_migrate)

    async def close(self) -> None:
        """What has begun is finished first."""
        await asyncio.to_thread(self._threads.shutdown)
        self._engine.dispose()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _transact(self, work: Callable[[Connection], T], *, writes: bool) -> T:
        try:
            with self._writing if writes else contextlib.nullcontext(), self._engine.connect() as connection:
                connection = connection.execution_options(mmserve_writes=writes)
                with connection.begin():
                    return work(connection)
        except DBAPIError as error:
            known = from_database(error)
            if known is None:
                raise
            _log.warning("the database failed: %s", error.orig)
            raise known from error

    def _create_file(self) -> None:
        """SQLite's own would be readable by all; what it puts beside it has the modes of this one."""
        path = self._engine.url.database
        if self.is_sqlite and path and path != ":memory:":
            with storing("The database"):
                Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                Path(path).touch(mode=0o600)


def newest(
    connection: Connection, table: Table, *where: ColumnElement[bool], limit: int, after: str | None
) -> tuple[Sequence[Row[Any]], bool]:
    """Rows by descending id, those below `after`, and whether there are more than `limit`."""
    query = select(table).where(*where).order_by(table.c.id.desc()).limit(limit + 1)
    if after is not None:
        query = query.where(table.c.id < after)
    rows = connection.execute(query).all()
    return rows[:limit], len(rows) > limit


def _make_engine(given: str) -> Engine:
    try:
        url = make_url(given)
        options: dict[str, Any] = {"pool_pre_ping": True}
        if url.get_backend_name() == "sqlite":
            options = {"connect_args": {} if "timeout" in url.query else {"timeout": _BUSY_SECONDS}}
        elif url.drivername != "postgresql+psycopg":
            raise ArgumentError
        # Parameters are what documents say: they do not belong into an error's text.
        engine = create_engine(url, pool_size=_NUM_THREADS, max_overflow=0, hide_parameters=True, **options)
    except (ArgumentError, NoSuchModuleError):
        raise RequestError(
            "invalid_request",
            "the database URL must be sqlite:///PATH or postgresql+psycopg://USER@HOST/NAME",
            param="database_url",
        ) from None
    except ModuleNotFoundError as error:
        raise _missing_driver(url, error) from None
    if engine.dialect.name == "sqlite":
        _follow_sqlite(engine)
    return engine


def _missing_driver(url: URL, error: ModuleNotFoundError) -> SetupError:
    return SetupError(
        "missing_dependency",
        f"{url.get_backend_name()} needs the package {error.name}: pip install 'mmserve[postgres]'",
        param="database_url",
    )


def _follow_sqlite(engine: Engine) -> None:
    """Transactions begin where SQLAlchemy says so, and a writing one with the lock: a later upgrade would not wait."""

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _record: Any) -> None:
        connection.isolation_level = None
        _write_ahead(connection)
        for pragma in ("synchronous = NORMAL", "foreign_keys = ON", "secure_delete = ON"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get("mmserve_writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Sets WAL mode. A file's first change to it is refused at once while others open the file, whatever the timeout
    (SQLite does not wait where waiting could be a deadlock), so the waiting is done here."""
    (busy_ms,) = connection.execute("PRAGMA busy_timeout").fetchone()
    give_up = time.monotonic() + busy_ms / 1000
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > give_up:
                raise
        time.sleep(_BUSY_PAUSE)


def _migrate(connection: Connection) -> None:
    from alembic import command
    from alembic.util import CommandError

    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _MIGRATION_LOCK})
    try:
        command.upgrade(migration_config(connection), "head")
    except CommandError as error:
        raise SetupError(
            "storage_unavailable", f"the database belongs to another version of mmserve: {error}", param="database_url"
        ) from None


def migration_config(connection: Connection) -> Any:
    """Alembic's configuration for migrations on this connection."""
    from alembic.config import Config

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    return config
