"""A PostgreSQL of its own for the tests that need one: Debian's programs, a folder that is thrown away, no port."""

import os
import pwd
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def postgres_socket() -> Iterator[Path]:
    """The folder of a running server's socket. Fails where PostgreSQL is not installed."""
    programs = _programs()
    folder = Path(tempfile.mkdtemp(prefix="mmserve-pg-", dir="/tmp"))
    user = _user_for(folder)
    data = folder / "data"
    settings = f"-c listen_addresses='' -c unix_socket_directories={folder} -c fsync=off"
    try:
        _run(user, programs / "initdb", "-D", data, "-U", "mmserve", "-A", "trust", "--no-sync", "-E", "UTF8")
        _run(user, programs / "pg_ctl", "-D", data, "-w", "-l", folder / "log", "-o", settings, "start")
        try:
            yield folder
        finally:
            _run(user, programs / "pg_ctl", "-D", data, "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def new_postgres_url(postgres_socket: Path) -> Callable[[], str]:
    """Makes an empty schema, which takes less time than a database, and gives the URL that leads into it."""
    import psycopg

    def make() -> str:
        name = f"test_{secrets.token_hex(8)}"
        with psycopg.connect(f"host={postgres_socket} user=mmserve dbname=postgres", autocommit=True) as connection:
            connection.execute(f"CREATE SCHEMA {name}".encode())
        return f"postgresql+psycopg://mmserve@/postgres?host={postgres_socket}&options=-csearch_path%3D{name}"

    return make


def _programs() -> Path:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    on_path = shutil.which("initdb")
    if not found and on_path is None:
        pytest.fail("PostgreSQL is not installed (Debian's package postgresql), and these tests need it")
    return found[-1].parent if found else Path(str(on_path)).resolve().parent


def _user_for(folder: Path) -> list[str]:
    """What to put before a command: PostgreSQL does not run as root."""
    if os.geteuid() != 0:
        return []
    account = pwd.getpwnam("postgres")
    os.chown(folder, account.pw_uid, account.pw_gid)
    return ["runuser", "-u", "postgres", "--"]


def _run(user: list[str], *command: str | Path) -> None:
    result = subprocess.run([*user, *map(str, command)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd="/tmp")
    assert result.returncode == 0, result.stderr.decode()
