"""Files on disk: whole or not at all, their owner's alone, and gone with all that was made of them."""

import asyncio
import errno
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from job_fakes import Office, document_text, ended
from sqlalchemy import Connection, Table, func, select

from mmserve.errors import RequestError, StorageError
from mmserve.jobs.database import Database
from mmserve.jobs.tables import files, metadata, page_texts, results

pytest_plugins = ["job_fixtures"]


async def num_rows(database: Database, *names: str) -> list[int]:
    def count(connection: Connection) -> list[int]:
        queries = [select(func.count()).select_from(metadata.tables[name]) for name in names]
        return [connection.execute(query).scalar_one() for query in queries]

    return await database.read(count)


async def owners_in(database: Database, table: Table) -> set[str]:
    return await database.read(lambda connection: set(connection.execute(select(table.c.owner)).scalars()))


def stored_paths(office: Office) -> list[Path]:
    return sorted(path for path in (office.folder / "data" / "files").rglob("*") if path.is_file())


def test_a_file_is_kept_as_it_was_sent(office: Office) -> None:
    async def scenario() -> None:
        async with office.service() as service:
            file = await office.add(service, b"\x00bytes\xff", name="../../etc/passwd")
            found = await service.files.get("anna", file.id)
        assert found == file
        assert found.path.read_bytes() == b"\x00bytes\xff"
        assert (found.num_bytes, found.filename) == (7, "../../etc/passwd")
        assert found.path.is_relative_to(office.folder / "data" / "files")
        assert "passwd" not in str(found.path)
        assert "anna" not in str(found.path)
        assert stat.S_IMODE(found.path.stat().st_mode) == 0o600
        folders = [found.folder, found.folder.parent, found.folder.parent.parent, office.folder / "data"]
        assert [stat.S_IMODE(folder.stat().st_mode) for folder in folders] == [0o700] * 4
        assert found.to_dict() == {
            "id": file.id,
            "object": "file",
            "bytes": 7,
            "created_at": int(file.created_at),
            "expires_at": int(file.created_at + 7 * 24 * 3600),
            "filename": "../../etc/passwd",
            "media_type": "application/pdf",
            "num_pages": 1,
            "sha256": file.sha256,
        }

    asyncio.run(scenario())


@pytest.mark.parametrize("name", ["a\0b.pdf", "\ud800.pdf", "Ä 文書 🗎.pdf", "x" * 5000, "'; DROP TABLE files; --"])
def test_any_name_is_only_a_name(office: Office, name: str) -> None:
    async def scenario() -> None:
        async with office.service() as service:
            file = await office.add(service, "text", name=name)
            assert (await service.files.get("anna", file.id)).filename == name

    asyncio.run(scenario())


def test_another_owners_file_is_not_there(office: Office) -> None:
    async def scenario() -> None:
        async with office.service() as service:
            file = await office.add(service, "text")
            for attempt in (service.files.get("bert", file.id), service.files.delete("bert", file.id)):
                with pytest.raises(RequestError) as refused:
                    await attempt
                assert refused.value.code == "not_found"
            assert await service.files.list("bert") == ([], False)
            assert (await service.files.get("anna", file.id)).path.exists()

    asyncio.run(scenario())


def test_an_owners_files_take_so_much_together(office: Office) -> None:
    async def scenario() -> None:
        async with office.service(max_stored_bytes_of_owner=100) as service:
            first = await office.add(service, "x" * 60)
            with pytest.raises(StorageError, match="delete some") as refused:
                await office.add(service, "x" * 41)
            assert refused.value.code == "storage_full"
            assert [path.name for path in office.folder.glob("data/files/*/*")] == [first.id]
            await office.add(service, "x" * 41, owner="bert")
            await office.add(service, "x" * 40)
            await service.files.delete("anna", first.id)
            await office.add(service, "x" * 60)

    asyncio.run(scenario())


@pytest.mark.parametrize("file_id", ["", "file-1", "../secret", "file-\0", "file-" + "g" * 36])
def test_an_id_that_is_none_is_not_found(office: Office, file_id: str) -> None:
    async def scenario() -> None:
        async with office.service() as service:
            with pytest.raises(RequestError) as refused:
                await service.files.get("anna", file_id)
            assert refused.value.code == "not_found"

    asyncio.run(scenario())


def test_files_are_listed_the_newest_first(office: Office) -> None:
    async def scenario() -> None:
        async with office.service() as service:
            made = []
            for number in range(5):
                made.append((await office.add(service, f"text {number}")).id)
                await asyncio.sleep(0.002)
            first, has_more = await service.files.list("anna", limit=3)
            assert ([file.id for file in first], has_more) == (made[:1:-1], True)
            # The last one may have been deleted meanwhile.
            await service.files.delete("anna", first[-1].id)
            rest, has_more = await service.files.list("anna", limit=3, after=first[-1].id)
            assert ([file.id for file in rest], has_more) == (made[1::-1], False)

    asyncio.run(scenario())


def test_deleting_a_file_removes_all_that_was_made_of_it(office: Office) -> None:
    async def draw() -> bytes:
        return b"picture"

    async def scenario() -> None:
        async with office.service() as service:
            database = service._database
            file = await office.add(service, document_text(2))
            theirs = await office.add(service, document_text(2), owner="bert")
            for owner, file_id in (("anna", file.id), ("bert", theirs.id)):
                job, _ = await service.jobs.create(owner, "summarize", [file_id], {})
                assert (await ended(service, job)).status == "done"
            await service.files.page_picture(file, 1, 200, draw)
            assert await num_rows(database, "files", "page_texts", "results") == [2, 4, 2]
            await service.files.delete("anna", file.id)
            assert not file.folder.exists()
            assert theirs.path.exists()
            for table in (files, page_texts, results):
                assert await owners_in(database, table) == {"bert"}
            assert await service.files.page_picture(file, 1, 200, draw) == b"picture"
            assert not file.folder.exists()

    asyncio.run(scenario())


def test_what_a_job_makes_of_a_deleted_file_is_not_kept(office: Office) -> None:
    async def scenario() -> None:
        async with office.service() as service:
            file = await office.add(service, document_text(3))

            def delete_in_the_middle(number: int) -> None:
                if number == 2:
                    tasks.append(asyncio.create_task(service.files.delete("anna", file.id)))

            tasks: list[asyncio.Task[None]] = []
            office.desk.reader.on_page = delete_in_the_middle
            office.desk.reader.delay = 0.05
            job, _ = await service.jobs.create("anna", "summarize", [file.id], {})
            assert (await ended(service, job)).status == "done"
            await tasks[0]
            assert await num_rows(service._database, "files", "page_texts", "results") == [0, 0, 0]

    asyncio.run(scenario())


def test_a_page_is_drawn_once(office: Office) -> None:
    drawn = []

    async def draw() -> bytes:
        drawn.append(1)
        return b"picture"

    async def scenario() -> None:
        async with office.service() as service:
            file = await office.add(service, "text")
            for width in (200, 200, 300):
                assert await service.files.page_picture(file, 1, width, draw) == b"picture"
        assert len(drawn) == 2

    asyncio.run(scenario())


def test_many_widths_do_not_fill_the_disk(sqlite_office: Office) -> None:
    async def draw() -> bytes:
        return b"picture"

    async def scenario() -> None:
        async with sqlite_office.service() as service:
            file = await sqlite_office.add(service, "text")
            for number in (1, 11):
                for width in range(100, 120):
                    assert await service.files.page_picture(file, number, width, draw) == b"picture"
        assert len(stored_paths(sqlite_office)) == 1 + 2 * 8

    asyncio.run(scenario())


def test_files_go_when_their_time_has_come_unless_a_job_needs_them(office: Office) -> None:
    async def scenario() -> None:
        async with office.service(retention_seconds=60.0) as service:
            old = await office.add(service, "old text")
            needed = await office.add(service, document_text(1, title="obstacle"))
            job, _ = await service.jobs.create("anna", "summarize", [needed.id], {})
            office.clock.ahead = 61.0
            new = await office.add(service, "new text")
            await service.sweep()
            assert [file.id for file in (await service.files.list("anna"))[0]] == [new.id, needed.id]
            assert stored_paths(office) == sorted([new.path, needed.path])
            assert not old.path.exists()
            await service.jobs.cancel("anna", job.id)
            await service.sweep()
            assert stored_paths(office) == [new.path]

    asyncio.run(scenario())


def test_results_and_events_of_jobs_go_when_their_time_has_come(office: Office) -> None:
    async def scenario() -> None:
        async with office.service(retention_seconds=60.0) as service:
            file = await office.add(service, document_text(1))
            job, _ = await service.jobs.create("anna", "summarize", [file.id], {})
            await ended(service, job)
            office.clock.ahead = 59.0
            await service.sweep()
            for _ in range(3):
                assert (await service.jobs.get("anna", job.id)).results
            office.clock.ahead = 62.0
        async with office.service(retention_seconds=60.0) as service:
            names = [name for name in metadata.tables if name != "alembic_version"]
            assert await num_rows(service._database, *names) == [0] * len(names)
        assert stored_paths(office) == []

    asyncio.run(scenario())


def test_what_a_killed_server_left_half_done_is_swept(office: Office) -> None:
    async def scenario() -> None:
        async with office.service() as service:
            file = await office.add(service, "text")
        folder = file.folder.parent
        orphans = [folder / ("file-" + "0" * 36), folder / (".file-" + "1" * 36)]
        for orphan in orphans:
            orphan.mkdir()
            (orphan / "content").write_bytes(b"half")
        async with office.service() as service:
            # Another server may be filling them.
            assert all(orphan.exists() for orphan in orphans)
            for path in (*orphans, file.folder):
                os.utime(path, (time.time() - 3600, time.time() - 3600))
            await service.sweep()
            assert not any(orphan.exists() for orphan in orphans)
            assert file.path.read_text() == "text"

    asyncio.run(scenario())


def refusing(code: int) -> Callable[..., Any]:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return refuse


@pytest.mark.parametrize(
    ("place", "code", "error_code", "status"),
    [
        ("mmserve.jobs.files.shutil.copyfileobj", errno.ENOSPC, "storage_full", 507),
        ("mmserve.jobs.files.os.fsync", errno.EDQUOT, "storage_full", 507),
        ("mmserve.jobs.files.os.fsync", errno.EIO, "storage_unavailable", 503),
        ("mmserve.jobs.files.Path.mkdir", errno.EROFS, "storage_unavailable", 503),
        ("mmserve.jobs.files.Path.rename", errno.EACCES, "storage_unavailable", 503),
    ],
)
def test_a_disk_that_does_not_take_a_file_keeps_no_half_of_it(
    sqlite_office: Office, monkeypatch: pytest.MonkeyPatch, place: str, code: int, error_code: str, status: int
) -> None:
    async def scenario() -> None:
        async with sqlite_office.service() as service:
            with monkeypatch.context() as broken:
                broken.setattr(place, refusing(code))
                with pytest.raises(StorageError) as failed:
                    await sqlite_office.add(service, "text")
            assert (failed.value.code, failed.value.http_status) == (error_code, status)
            assert await service.files.list("anna") == ([], False)
            assert stored_paths(sqlite_office) == []
            assert (await sqlite_office.add(service, "text")).path.read_text() == "text"

    asyncio.run(scenario())


def test_a_picture_that_cannot_be_kept_is_shown_all_the_same(
    sqlite_office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def draw() -> bytes:
        return b"picture"

    async def scenario() -> None:
        async with sqlite_office.service() as service:
            file = await sqlite_office.add(service, "text")
            monkeypatch.setattr("mmserve.jobs.files.Path.rename", refusing(errno.ENOSPC))
            assert await service.files.page_picture(file, 1, 200, draw) == b"picture"
        assert stored_paths(sqlite_office) == [file.path]

    asyncio.run(scenario())


def test_a_data_folder_that_cannot_be_made_is_an_error_that_says_so(sqlite_office: Office) -> None:
    (sqlite_office.folder / "data").write_text("a file in its place")

    async def scenario() -> None:
        with pytest.raises(StorageError, match="operator") as failed:
            await sqlite_office.service().__aenter__()
        assert failed.value.code == "storage_unavailable"

    asyncio.run(scenario())
