"""Browsers: security headers on every answer, other sites' pages kept out, and let in where the operator says so."""

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from live_server import LiveServer, serving
from scripted_engine import ScriptedEngine, failing

from mmserve.errors import RequestError
from mmserve.server.access import KeyRing
from mmserve.server.browsers import host_name
from mmserve.server.settings import AccessSettings

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
KEY = "alice-0123456789abcdef"
LOCAL = ("localhost", "127.0.0.1", "[::1]")
SITE = "https://docs.example.org"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with serving(ScriptedEngine(), access=AccessSettings(allowed_hosts=LOCAL), max_json_bytes=2000) as live:
        yield live


def check_headers(response: httpx.Response) -> None:
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["x-frame-options"] == "DENY"
    assert response.headers["referrer-policy"] == "no-referrer"
    assert response.headers["cross-origin-resource-policy"] == "same-origin"
    assert response.headers["x-request-id"]
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none';")
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert response.headers["cache-control"] == "no-store"
    assert "server" not in response.headers


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        *(("GET", "/health", 200), ("GET", "/v1/models", 200), ("GET", "/metrics", 200), ("GET", "/docs", 200)),
        *(("GET", "/nothing", 404), ("GET", CHAT, 405), ("POST", CHAT, 415), ("OPTIONS", CHAT, 405)),
    ],
)
def test_security_headers_are_on_every_answer(server: LiveServer, method: str, path: str, status: int) -> None:
    response = httpx.request(method, server.url + path)
    assert response.status_code == status
    check_headers(response)


def test_they_are_on_streams_refusals_and_faults(server: LiveServer) -> None:
    streamed = httpx.post(server.url + CHAT, json={**HELLO, "stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    check_headers(streamed)
    too_large = httpx.post(server.url + CHAT, content=b"x" * 3000)
    assert too_large.status_code == 413
    check_headers(too_large)
    access = AccessSettings(keys=KeyRing([KEY]))
    with serving(failing(RuntimeError("inside"), after=0), access=access) as faulty:
        check_headers(httpx.get(f"{faulty.url}/v1/models"))
        fault = httpx.post(faulty.url + CHAT, json=HELLO, headers={"X-Api-Key": KEY})
        assert fault.status_code == 500
        check_headers(fault)


def test_what_the_interface_answers_cannot_run_and_a_page_runs_its_own_files(server: LiveServer) -> None:
    of_interface = httpx.get(f"{server.url}/v1/models").headers["content-security-policy"]
    assert "script-src" not in of_interface
    assert "sandbox" in of_interface
    of_page = httpx.get(f"{server.url}/docs").headers["content-security-policy"]
    assert "script-src 'self';" in of_page
    assert "img-src 'self' blob: data:;" in of_page


def test_docs_load_nothing_from_elsewhere(server: LiveServer) -> None:
    page = httpx.get(f"{server.url}/docs").text
    assert "://" not in page
    assert "<script>" not in page
    for path, media_type in re.findall(r'(?:src|href)="(docs/[^"]*\.(js|css))"', page):
        asset = httpx.get(f"{server.url}/{path}")
        assert asset.status_code == 200
        assert asset.headers["content-type"].startswith("text/javascript" if media_type == "js" else "text/css")
        assert len(asset.content) > 50
    assert httpx.get(f"{server.url}/docs/redoc.standalone.js").status_code == 404
    schemes = httpx.get(f"{server.url}/openapi.json").json()["components"]["securitySchemes"]
    assert {scheme["type"] for scheme in schemes.values()} == {"http", "apiKey"}


# Names


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1:1", "[::1]:8000", "[::1]"])
def test_the_names_of_this_machine_are_answered_to(server: LiveServer, host: str) -> None:
    assert httpx.get(f"{server.url}/v1/models", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:8000", "10.0.0.1", "evil.example:127.0.0.1"],
)
@pytest.mark.parametrize("path", ["/v1/models", "/", "/docs", "/metrics"])
def test_a_name_that_was_bound_to_this_address_is_not(server: LiveServer, host: str, path: str) -> None:
    response = httpx.get(server.url + path, headers={"Host": host})
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "forbidden"
    assert "--allowed-host" in response.json()["error"]["message"]


def test_health_is_answered_under_any_name(server: LiveServer) -> None:
    assert httpx.get(f"{server.url}/health", headers={"Host": "pod.cluster"}).status_code == 200


def test_with_keys_or_without_names_any_name_will_do() -> None:
    for access in (AccessSettings(keys=KeyRing([KEY]), allowed_hosts=LOCAL), AccessSettings()):
        with serving(ScriptedEngine(), access=access) as server:
            headers = {"Host": "docs.example.org", "X-Api-Key": KEY}
            assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("host", "expected"),
    [("a.b:80", "a.b"), ("[::1]:80", "::1"), ("::1", "::1"), ("A.", "a"), ("", ""), ("[::1].evil", "[::1].evil")],
)
def test_host_names(host: str, expected: str) -> None:
    assert host_name(host) == expected


# Other sites


def preflight(url: str, origin: str = SITE) -> httpx.Response:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    return httpx.options(url, headers={"Origin": origin, **asked})


@pytest.mark.parametrize("origin", [SITE, "null", "http://localhost:1", "https://127.0.0.1"])
def test_a_page_of_another_site_is_refused_where_there_are_no_keys(server: LiveServer, origin: str) -> None:
    response = httpx.post(server.url + CHAT, json=HELLO, headers={"Origin": origin})
    assert response.status_code == 403
    assert "--cors-origin" in response.json()["error"]["message"]
    assert not any(name.startswith("access-control") for name in response.headers)


def test_the_servers_own_page_is_not(server: LiveServer) -> None:
    assert httpx.post(server.url + CHAT, json=HELLO, headers={"Origin": server.url}).status_code == 200


def test_cross_origin_is_off_by_default(server: LiveServer) -> None:
    response = preflight(server.url + CHAT)
    assert response.status_code == 403
    assert not any(name.startswith("access-control") for name in response.headers)


@pytest.mark.parametrize("keys", [None, KeyRing([KEY])], ids=["no keys", "keys"])
def test_an_origin_that_is_allowed_may_ask_and_read(keys: KeyRing | None) -> None:
    access = AccessSettings(keys=keys, allowed_hosts=LOCAL, cors_origins=(SITE,))
    with serving(ScriptedEngine(), access=access) as server:
        allowed = preflight(server.url + CHAT)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == SITE
        assert "Authorization" in allowed.headers["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in allowed.headers
        answer = httpx.post(server.url + CHAT, json=HELLO, headers={"Origin": SITE, "X-Api-Key": KEY})
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == SITE
        assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
        refused = httpx.post(server.url + CHAT, content=b"", headers={"Origin": SITE})
        assert refused.headers["access-control-allow-origin"] == SITE, "or the page could not read why"
        other = preflight(server.url + CHAT, "https://evil.example")
        assert other.status_code == 400
        assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize(
    "origin", ["docs.example.org", "https://docs.example.org/", "https://", "file://x", "https://a@b"]
)
def test_an_origin_that_no_browser_sends_is_an_error_at_start(origin: str) -> None:
    with pytest.raises(RequestError, match="--cors-origin"):
        AccessSettings(cors_origins=(origin,))


def test_all_origins_may_be_allowed() -> None:
    with serving(ScriptedEngine(), access=AccessSettings(cors_origins=("*",))) as server:
        headers: dict[str, Any] = {"Origin": "https://anywhere.example"}
        answer = httpx.post(server.url + CHAT, json=HELLO, headers=headers)
        assert answer.headers["access-control-allow-origin"] == "*"
