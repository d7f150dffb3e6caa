"""Each test that asks for `office` runs on SQLite and on PostgreSQL."""

from collections.abc import Callable
from pathlib import Path

import pytest
from job_fakes import Office


@pytest.fixture(params=["sqlite", "postgres"])
def office(request: pytest.FixtureRequest, tmp_path: Path) -> Office:
    if request.param == "sqlite":
        return Office(tmp_path, f"sqlite:///{tmp_path}/data/jobs.db")
    new_url: Callable[[], str] = request.getfixturevalue("new_postgres_url")
    return Office(tmp_path, new_url())


@pytest.fixture
def sqlite_office(tmp_path: Path) -> Office:
    return Office(tmp_path, f"sqlite:///{tmp_path}/data/jobs.db?timeout=0.2")
