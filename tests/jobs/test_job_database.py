"""The database: migrations, and what happens where it cannot be used."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from job_fakes import Office, document_text, ended, until
from sqlalchemy import Connection, event, text

from mmserve.errors import RequestError, SetupError, StorageError
from mmserve.jobs.database import MIGRATIONS, Database, migration_config
from mmserve.jobs.settings import JobSettings
from mmserve.jobs.tables import metadata

pytest_plugins = ["job_fixtures"]

REVISIONS = [script.revision for script in ScriptDirectory(str(MIGRATIONS)).walk_revisions()]


def differences(connection: Connection) -> list[object]:
    return list(compare_metadata(MigrationContext.configure(connection), metadata))


@pytest.mark.parametrize("revision", ["base", *REVISIONS])
def test_migrations_lead_from_any_revision_to_the_tables(office: Office, revision: str) -> None:
    async def scenario() -> None:
        database = office.database()
        (office.folder / "data").mkdir()
        if revision != "base":
            await database.write(lambda connection: command.upgrade(migration_config(connection), revision))
        await database.migrate()
        assert await database.read(differences) == []
        await database.close()

    asyncio.run(scenario())


def test_a_difference_between_tables_and_migrations_would_be_seen(office: Office) -> None:
    async def scenario() -> None:
        database = office.database()
        await database.migrate()
        await database.write(lambda connection: connection.execute(text("ALTER TABLE files DROP COLUMN num_bytes")))
        assert len(await database.read(differences)) == 1
        await database.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("_time", range(5))
def test_servers_that_start_at_once_migrate_once(office: Office, _time: int) -> None:
    async def scenario() -> None:
        databases = [office.database() for _ in range(8)]
        await asyncio.gather(*(database.migrate() for database in databases))
        assert await databases[0].read(differences) == []
        for database in databases:
            await database.close()

    asyncio.run(scenario())


def test_the_database_of_a_later_version_is_left_alone(office: Office) -> None:
    async def scenario() -> None:
        database = office.database()
        await database.migrate()
        await database.write(
            lambda connection: connection.execute(text("UPDATE alembic_version SET version_num = 'z'"))
        )
        with pytest.raises(SetupError, match="another version of mmserve"):
            await database.migrate()
        await database.close()

    asyncio.run(scenario())


def test_what_fails_in_the_middle_leaves_nothing(office: Office) -> None:
    def fail(connection: Connection) -> None:
        connection.execute(text("UPDATE alembic_version SET version_num = 'z'"))
        raise ZeroDivisionError

    async def scenario() -> None:
        database = office.database()
        await database.migrate()
        with pytest.raises(ZeroDivisionError):
            await database.write(fail)
        await database.migrate()
        await database.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("url", ["", "nonsense", "mysql://host/name", "postgresql://host/name", "oracle+x://a"])
def test_a_url_of_another_kind_is_refused(url: str) -> None:
    with pytest.raises(RequestError, match="database URL") as refused:
        Database(url)
    assert refused.value.param == "database_url"


def test_a_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "psycopg", None)
    with pytest.raises(SetupError, match=r"psycopg.*mmserve\[postgres\]") as missing:
        Database("postgresql+psycopg://host/name")
    assert missing.value.code == "missing_dependency"


def test_a_server_that_is_not_there_is_an_error_without_its_password(tmp_path: Path) -> None:
    async def scenario() -> None:
        database = Database(f"postgresql+psycopg://anna:secret@/name?host={tmp_path}")
        with pytest.raises(StorageError, match="does not answer") as failed:
            await database.migrate()
        assert failed.value.http_status == 503
        assert "secret" not in str(failed.value)
        await database.close()

    asyncio.run(scenario())


def test_a_locked_database_refuses_and_then_goes_on(sqlite_office: Office) -> None:
    async def scenario() -> None:
        async with sqlite_office.service() as service:
            with closing(sqlite3.connect(sqlite_office.folder / "data" / "jobs.db")) as other:
                other.execute("BEGIN IMMEDIATE")
                with pytest.raises(StorageError, match="locked") as failed:
                    await sqlite_office.add(service, "text")
                assert failed.value.code == "storage_unavailable"
                assert await service.files.list("anna") == ([], False)
                assert not [path for path in (sqlite_office.folder / "data" / "files").rglob("*") if path.is_file()]
                other.rollback()
            assert (await sqlite_office.add(service, "text")).num_bytes == 4

    asyncio.run(scenario())


def test_a_job_waits_while_the_database_is_locked(
    sqlite_office: Office, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("mmserve.jobs.runner._OBSTACLE_SECONDS", 0.01)
    reader = sqlite_office.desk.reader
    reader.delay = 0.02

    async def scenario() -> None:
        async with sqlite_office.service() as service:
            file = await sqlite_office.add(service, document_text(6))
            job, _ = await service.jobs.create("anna", "summarize", [file.id], {})
            await until(lambda: len(reader.read) == 2)
            with closing(sqlite3.connect(sqlite_office.folder / "data" / "jobs.db")) as other:
                other.execute("BEGIN IMMEDIATE")
                await until(lambda: "has to wait" in caplog.text)
                other.rollback()
            done = await ended(service, job)
        assert done.status == "done"
        # The page whose text could not be kept was read again.
        assert sorted(set(reader.read)) == [1, 2, 3, 4, 5, 6]
        assert len(reader.read) <= 8

    asyncio.run(scenario())


def test_a_full_database_says_so_and_keeps_no_file(sqlite_office: Office) -> None:
    async def scenario() -> None:
        async with sqlite_office.service() as service:
            engine = service._database._engine

            @event.listens_for(engine, "begin")
            def allow_no_more_pages(connection: Connection) -> None:
                connection.exec_driver_sql("PRAGMA max_page_count = 1")

            with pytest.raises(StorageError, match="disk is full") as failed:
                await sqlite_office.add(service, "text", name="x" * 200_000)
            assert (failed.value.code, failed.value.http_status) == ("storage_full", 507)
            assert not [path for path in (sqlite_office.folder / "data" / "files").rglob("*") if path.is_file()]
            event.remove(engine, "begin", allow_no_more_pages)

    asyncio.run(scenario())


def test_nobody_else_can_read_the_database(sqlite_office: Office) -> None:
    """Not even where the folder was there before, for all to read."""
    (sqlite_office.folder / "data").mkdir(mode=0o755)

    async def scenario() -> None:
        async with sqlite_office.service() as service:
            await sqlite_office.add(service, "text")
            modes = {
                path.name: path.stat().st_mode & 0o777 for path in (sqlite_office.folder / "data").glob("jobs.db*")
            }
        assert modes == dict.fromkeys(("jobs.db", "jobs.db-wal", "jobs.db-shm"), 0o600)

    asyncio.run(scenario())


def test_by_default_the_database_lies_in_the_data_folder(tmp_path: Path) -> None:
    assert JobSettings(data_dir=tmp_path).url == f"sqlite:///{tmp_path}/mmserve.db"
    with pytest.raises(RequestError) as refused:
        JobSettings(data_dir=tmp_path, retention_seconds=0)
    assert refused.value.param == "retention_seconds"
