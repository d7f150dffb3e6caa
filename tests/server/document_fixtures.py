"""A reader of pages, folders and a client, for tests of routes that take documents."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from live_server import LiveServer

from mmserve.vision.pages import PageReader


@pytest.fixture(scope="module")
def reader() -> Iterator[PageReader]:
    made = PageReader(num_workers=1)
    yield made
    made.close()


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Where a server keeps what it was sent, and where it puts uploads."""
    return tmp_path_factory.mktemp("data"), tmp_path_factory.mktemp("uploads")


@pytest.fixture
def api(server: LiveServer) -> Iterator[httpx.Client]:
    """A client of the module's own `server`."""
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
