"""Request ids: the client's own where it is sane, in every answer, in the context of logs, in engine ids."""

import logging
from collections.abc import Iterator

import httpx
import pytest
from live_server import LiveServer, serving
from scripted_engine import ScriptedEngine

from mmserve.server.request_id import REQUEST_ID

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def server(engine: ScriptedEngine) -> Iterator[LiveServer]:
    with serving(engine) as live:
        yield live


@pytest.mark.parametrize("stream", [False, True])
def test_a_sane_id_comes_back(server: LiveServer, stream: bool) -> None:
    answer = httpx.post(server.url + CHAT, json={**HELLO, "stream": stream}, headers={"X-Request-Id": "order-7.a_B"})
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] == "order-7.a_B"


@pytest.mark.parametrize("sent", ["", "a b", "x" * 129, "a\u00e9", "a/b", 'a"b', "{}"])
def test_any_other_gives_way_to_one_of_ours(server: LiveServer, sent: str) -> None:
    answer = httpx.get(f"{server.url}/health", headers={b"X-Request-Id": sent.encode("latin-1")})
    assert answer.headers["x-request-id"].startswith("req-")
    assert sent == "" or sent not in answer.headers["x-request-id"]


def test_two_ids_in_one_request_are_none(server: LiveServer) -> None:
    answer = httpx.get(f"{server.url}/health", headers=[("X-Request-Id", "a"), ("X-Request-Id", "b")])
    assert answer.headers["x-request-id"].startswith("req-")


def test_each_request_without_one_gets_its_own(server: LiveServer) -> None:
    ids = {httpx.get(f"{server.url}/health").headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3


@pytest.mark.parametrize(("path", "status"), [("/nothing/here", 404), (CHAT, 405)])
def test_errors_carry_it(server: LiveServer, path: str, status: int) -> None:
    answer = httpx.get(server.url + path, headers={"X-Request-Id": "e-1"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (status, "e-1")


def test_a_fault_of_the_server_carries_it_and_is_logged_within_it(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str | None] = []

    class Noting(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            seen.append(REQUEST_ID.get())
            return True

    noting = Noting()
    logging.getLogger("mmserve.server.errors").addFilter(noting)
    try:
        with serving(ScriptedEngine(failure=RuntimeError("inside"))) as server:
            answer = httpx.post(server.url + CHAT, json=HELLO, headers={"X-Request-Id": "e-2"})
    finally:
        logging.getLogger("mmserve.server.errors").removeFilter(noting)
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "e-2")
    assert seen == ["e-2"]
