"""API keys: who gets in, as whom, by what comparison; and that no key is ever told."""

import asyncio
import hmac
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import LiveServer, serving
from scripted_engine import ScriptedEngine

from mmserve.errors import RequestError
from mmserve.server.access import KeyRing, RequireKey
from mmserve.server.logs import ACCESS_LOGGER
from mmserve.server.settings import AccessSettings

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
ALICE, BOB, NAMELESS = "alice-0123456789abcdef", "bob-0123456789abcdef", "nameless-0123456789abcdef"
LINES = ["# who may ask", f"alice:{ALICE}", "", f"bob: {BOB}", NAMELESS]


def with_keys(*lines: str, **changes: Any) -> AccessSettings:
    return AccessSettings(keys=KeyRing(lines or LINES), **changes)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with serving(ScriptedEngine(), access=with_keys()) as live:
        yield live


def refused(response: httpx.Response) -> str:
    """The sentence of a refusal that is as it should be."""
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    assert error["code"] == "unauthorized"
    message: str = error["message"]
    return message


@pytest.mark.parametrize("key", [ALICE, BOB, NAMELESS])
@pytest.mark.parametrize("header", ["Authorization", "authorization", "X-Api-Key"])
def test_a_known_key_opens_in_either_header(server: LiveServer, key: str, header: str) -> None:
    value = key if header == "X-Api-Key" else f"Bearer {key}"
    answer = httpx.post(server.url + CHAT, json=HELLO, headers={header: value})
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["content"] == "Hello, world"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer"},
        {"Authorization": ALICE},
        {"Authorization": f"Basic {ALICE}"},
        {"Cookie": f"key={ALICE}"},
    ],
)
def test_without_a_key_nothing_opens(server: LiveServer, headers: dict[str, str]) -> None:
    message = refused(httpx.post(server.url + CHAT, json=HELLO, headers=headers))
    assert "Authorization: Bearer KEY" in message or "not known" in message


@pytest.mark.parametrize(
    "key",
    [
        *("x", ALICE[:-1], ALICE + "x", ALICE.upper(), f"alice:{ALICE}", "# who may ask", "alice", "null", "*"),
        *("\u00fc" * 20, "\u2028\u202e", "\x7f" * 16, "\U0001f511" * 8, "a" * 7000),
    ],
)
@pytest.mark.parametrize("header", ["Authorization", "X-Api-Key"])
def test_a_wrong_key_is_refused_whatever_it_is(server: LiveServer, key: str, header: str) -> None:
    value = key.encode() if header == "X-Api-Key" else b"Bearer " + key.encode()
    message = refused(httpx.get(f"{server.url}/v1/models", headers={header.encode(): value}))
    assert (
        message
        == "The API key of this request is not known here. Check it, or ask the operator of this server for one."
    )


def test_bytes_that_are_no_text_are_a_wrong_key(server: LiveServer) -> None:
    refused(httpx.get(f"{server.url}/v1/models", headers={b"Authorization": b"Bearer \xff\xfe\x80"}))


def test_one_key_in_both_headers_is_one_and_two_are_refused(server: LiveServer) -> None:
    url = f"{server.url}/v1/models"
    assert httpx.get(url, headers={**bearer(ALICE), "X-Api-Key": ALICE}).status_code == 200
    message = refused(httpx.get(url, headers={**bearer(ALICE), "X-Api-Key": BOB}))
    assert "send one of them" in message
    refused(httpx.get(url, headers=[("Authorization", f"Bearer {ALICE}"), ("Authorization", f"Bearer {BOB}")]))


def test_a_key_in_the_query_is_none(server: LiveServer) -> None:
    refused(httpx.get(f"{server.url}/v1/models", params={"api_key": ALICE, "key": ALICE}))


@pytest.mark.parametrize(
    "path", ["/v1/models", "/metrics", "/docs", "/docs/start.js", "/openapi.json", "/version", "/x"]
)
def test_all_but_health_and_the_page_follow_the_key(server: LiveServer, path: str) -> None:
    refused(httpx.get(server.url + path))
    assert httpx.get(server.url + path, headers=bearer(ALICE)).status_code == (404 if path == "/x" else 200)


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_health_is_open_with_and_without_a_key(server: LiveServer, path: str) -> None:
    for headers in ({}, bearer("wrong"), bearer(ALICE)):
        assert httpx.get(server.url + path, headers=headers).status_code == 200


@pytest.mark.parametrize("path", ["/", "/static/page.js"])
def test_the_page_is_open_since_it_asks_for_the_key(server: LiveServer, path: str) -> None:
    assert httpx.get(server.url + path).status_code != 401


@pytest.mark.parametrize(
    "path",
    ["/static/../v1/models", "/static/%2e%2e/v1/models", "//v1/models", "/health/../v1/models", "/v1/models?/static/"],
)
def test_no_spelling_of_a_path_gets_around_the_key(server: LiveServer, path: str) -> None:
    request = httpx.Request("GET", server.url)
    request.url = httpx.URL(server.url).copy_with(raw_path=path.encode())
    with httpx.Client() as client:
        assert client.send(request).status_code in (401, 404)


@pytest.mark.parametrize("flag", ["open_metrics", "open_docs"])
def test_flags_open_metrics_and_docs(flag: str) -> None:
    paths = {"open_metrics": ["/metrics"], "open_docs": ["/docs", "/docs/swagger-ui.css", "/openapi.json"]}
    with serving(ScriptedEngine(), access=with_keys(**{flag: True})) as server:
        for name, each in paths.items():
            for path in each:
                assert httpx.get(server.url + path).status_code == (200 if name == flag else 401)
        refused(httpx.get(f"{server.url}/v1/models"))


def test_a_refusal_reaches_a_sender_of_a_large_body(server: LiveServer) -> None:
    refused(httpx.post(f"{server.url}/v1/summarize", content=iter([b"x" * 1000] * 3000)))


# The comparison


def test_every_key_is_compared_in_constant_time_whether_one_fits_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    true_compare = hmac.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return true_compare(one, other)

    monkeypatch.setattr("mmserve.server.access.hmac.compare_digest", compare)
    ring = KeyRing(LINES)
    for key, is_known in ((ALICE, True), (NAMELESS, True), ("wrong", False), ("", False)):
        compared.clear()
        assert (ring.owner_of(key.encode()) is not None) == is_known
        assert len(compared) == 3
        assert all(len(one) == len(other) == 32 for one, other in compared)
        assert not any(key.encode() in pair for pair in compared if key)


# Owners


def test_owners_are_digests_and_stay_with_the_name() -> None:
    before, after = KeyRing(LINES), KeyRing(["alice:another-0123456789", f"bob:{BOB}", NAMELESS])
    assert before.owner_of(ALICE.encode()) == after.owner_of(b"another-0123456789")
    assert after.owner_of(ALICE.encode()) is None
    owners = [before.owner_of(key.encode()) for key in (ALICE, BOB, NAMELESS)]
    assert len(set(owners)) == 3
    assert before.owner_of(NAMELESS.encode()) == after.owner_of(NAMELESS.encode())
    for owner, secret in zip(owners, ("alice", "bob", NAMELESS), strict=True):
        assert owner is not None
        assert len(owner) == 32
        assert secret not in owner


def test_a_name_cannot_pass_for_a_key() -> None:
    ring = KeyRing([f"{NAMELESS}:{ALICE}", NAMELESS])
    assert ring.owner_of(ALICE.encode()) != ring.owner_of(NAMELESS.encode())


def test_the_application_sees_whose_request_it_is() -> None:
    seen: list[Any] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope.get("state", {}).get("owner"))

    ring = KeyRing(LINES)

    async def ask(keys: KeyRing | None, *headers: tuple[bytes, bytes]) -> None:
        scope = {"type": "http", "path": "/v1/models", "headers": list(headers)}
        await RequireKey(application, keys=keys)(scope, None, None)  # type: ignore[arg-type]

    asyncio.run(ask(ring, (b"x-api-key", ALICE.encode())))
    asyncio.run(ask(ring, (b"authorization", b"bearer " + BOB.encode())))
    asyncio.run(ask(None, (b"x-api-key", ALICE.encode())))
    assert seen == [ring.owner_of(ALICE.encode()), ring.owner_of(BOB.encode()), None]


# The file


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("short", "16 characters"),
        ("alice:short", "16 characters"),
        ("a key with spaces in it", "16 characters"),
        ("\u00fcnlimited-access-for-all", "16 characters"),
        ("al ice:0123456789abcdef", "a name has"),
        (":0123456789abcdef", "a name has"),
        ("alice:", "16 characters"),
    ],
)
def test_a_line_that_is_wrong_is_named_but_not_repeated(tmp_path: Path, line: str, what: str) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# keys\n{line}\n", encoding="utf-8")
    with pytest.raises(RequestError, match=what) as caught:
        KeyRing(path=path)
    assert f"{path}, line 2" in str(caught.value)
    secret = line.rpartition(":")[2]
    assert not secret or secret not in str(caught.value)


@pytest.mark.parametrize("content", ["", "# nobody\n\n", f"alice:{ALICE}\nbob:{ALICE}\n"])
def test_no_key_and_a_key_twice_are_errors(tmp_path: Path, content: str) -> None:
    path = tmp_path / "keys"
    path.write_text(content)
    with pytest.raises(RequestError) as caught:
        KeyRing(path=path)
    assert ALICE not in str(caught.value)


def test_a_file_that_is_not_there_or_no_text_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="No such file"):
        KeyRing(path=tmp_path / "missing")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RequestError, match="UTF-8"):
        KeyRing(path=tmp_path / "binary")


def replace_file(path: Path, content: str) -> None:
    other = path.with_suffix(".new")
    other.write_text(content)
    os.replace(other, path)


def test_the_file_is_read_again_when_it_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys"
    path.write_text(f"alice:{ALICE}\n")
    with serving(ScriptedEngine(), access=AccessSettings(keys=KeyRing(path=path))) as server:

        def status(key: str) -> int:
            return httpx.get(f"{server.url}/v1/models", headers=bearer(key)).status_code

        assert (status(ALICE), status(BOB)) == (200, 401)
        replace_file(path, f"alice:{ALICE}\nbob:{BOB}\n")
        assert (status(ALICE), status(BOB)) == (200, 200)
        replace_file(path, f"bob:{BOB}\n")
        assert (status(ALICE), status(BOB)) == (401, 200)
        for broken in ("", "short\n"):
            replace_file(path, broken)
            assert (status(ALICE), status(BOB)) == (401, 200), "a file that is wrong neither opens nor closes"
        path.unlink()
        assert (status(ALICE), status(BOB)) == (401, 200)
        replace_file(path, f"alice:{ALICE}\n")
        assert (status(ALICE), status(BOB)) == (200, 401)
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    said = [record.getMessage() for record in warnings if record.name == "mmserve.server.access"]
    assert len(said) == 3, "each broken state is said once"
    assert all("stay in force" in message for message in said)


def test_keys_of_the_variable_and_of_the_file_go_together(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"bob:{BOB}\n")
    ring = KeyRing([f"alice:{ALICE}"], path=path)
    assert ring.owner_of(ALICE.encode())
    assert ring.owner_of(BOB.encode())
    replace_file(path, f"{NAMELESS}\n")
    assert ring.owner_of(ALICE.encode())
    assert not ring.owner_of(BOB.encode())
    assert repr(ring) == "KeyRing(2 keys)"


# Never told


def test_no_key_is_in_a_log_or_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    for logger in (None, "mmserve", ACCESS_LOGGER):
        caplog.set_level(logging.DEBUG, logger)
    wrong = "wrong-0123456789abcdef"
    answers = []
    with serving(ScriptedEngine(failure=RuntimeError("inside")), access=with_keys()) as server:
        for key in (ALICE, wrong):
            headers = {**bearer(key), "X-Api-Key": key}
            answers.append(httpx.post(server.url + CHAT, json=HELLO, headers=headers, params={"api_key": key}))
            answers.append(httpx.get(f"{server.url}/v1/models/{'x' * 9}", headers=headers, params={"key": key}))
            answers.append(httpx.post(server.url + CHAT, content=b"{", headers=headers))
    assert [answer.status_code for answer in answers] == [500, 404, 415, 401, 401, 401]
    ours = [record for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]
    logged = [record.getMessage() + repr(vars(record)) for record in ours]
    assert any(line.startswith("POST /v1/chat/completions 500") for line in logged)
    told = (
        logged + [answer.text + repr(answer.headers) for answer in answers] + [repr(server.app.state.server.settings)]
    )
    for line in told:
        assert ALICE not in line
        assert wrong not in line
