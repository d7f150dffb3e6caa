"""What all task routes have in common: bodies in JSON, stored files, URLs, the result cache, owners."""

import base64
import functools
import http.server
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from document_server import ANSWER, DAMAGED, TEXT, OwnerByHeader, error_code, events_of, scripted
from live_server import LiveServer, serving, wait_until

from mmserve.errors import StorageError
from mmserve.jobs.results import ResultCache
from mmserve.vision.pages import PageReader

pytest_plugins = ["document_fixtures"]

SUMMARY = "/v1/summarize"


def encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    """A site on this machine that has `TEXT` wherever one asks for a .txt."""

    class Site(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path.split("?")[0].endswith(".txt") else 404)
            self.end_headers()
            self.wfile.write(TEXT)

        def log_message(self, *_: Any) -> None:
            return None

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site) as site:
        thread = threading.Thread(target=site.serve_forever)
        thread.start()
        yield f"127.0.0.1:{site.server_port}"
        site.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def server(reader: PageReader, host: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    uploads = tmp_path_factory.mktemp("uploads")
    with serving(
        scripted(),
        reader=reader,
        upload_dir=uploads,
        allowed_media_hosts=(host,),
        max_files=4,
        max_json_bytes=4000,
        max_upload_bytes=9000,
        middleware=OwnerByHeader,
    ) as live:
        fetcher = live.app.state.server.fetcher
        live.app.state.server.fetcher = type(fetcher)(fetcher.allowed, fetcher.max_bytes, permits=lambda _address: True)
        yield live
        wait_until(lambda: not list(uploads.iterdir()))


@pytest.fixture
def ask(api: httpx.Client) -> Any:
    return functools.partial(api.post, SUMMARY)


@pytest.mark.parametrize("start", ["", "data:text/plain;base64,", "data:application/pdf;name=x;base64,"])
def test_a_file_may_come_in_the_body(ask: Any, start: str) -> None:
    response = ask(json={"file_data": start + encoded(TEXT), "filename": "in/voice.txt", "length": "short"})
    assert response.status_code == 200, response.text
    assert response.json()["name"] == "voice.txt"
    assert "[p. 1]" in response.json()["text"]


def test_a_stored_file_keeps_its_name_or_gets_another(api: httpx.Client, ask: Any) -> None:
    file_id = api.post("/v1/files", files={"file": ("stored.txt", TEXT)}).json()["id"]
    assert ask(json={"file_id": file_id}).json()["name"] == "stored.txt"
    assert ask(json={"file_id": file_id, "filename": "other.txt"}).json()["name"] == "other.txt"
    names = [data["name"] for _, data in events_of(ask(json={"file_id": file_id, "stream": True}).text)[:-1]]
    assert set(names) == {"stored.txt"}


def test_a_url_of_an_allowed_host_is_fetched(ask: Any, host: str) -> None:
    response = ask(json={"url": f"http://{host}/letters/may%20be.txt?x=/y"})
    assert response.status_code == 200, response.text
    assert response.json()["name"] == "may be.txt"
    assert error_code(ask(json={"url": f"http://{host}/none.pdf"})) == (400, "url_unreachable")
    for url in ("http://example.org/a.txt", "ftp://x/y", "http://[", "file:///etc/passwd", ""):
        assert error_code(ask(json={"url": url})) == (400, "url_not_allowed")


def test_several_places_make_a_list_with_an_error_for_each_that_failed(api: httpx.Client, ask: Any, host: str) -> None:
    file_id = api.post("/v1/files", files={"file": ("stored.txt", TEXT)}).json()["id"]
    files = [{"file_id": file_id}, {"url": f"http://{host}/none"}, {"file_data": "?"}, {"file_data": encoded(DAMAGED)}]
    response = ask(json={"files": files})
    assert response.status_code == 200
    found = [(one.get("object"), one.get("error", {}).get("code")) for one in response.json()["data"]]
    assert found == [
        ("summary", None),
        (None, "url_unreachable"),
        (None, "invalid_request"),
        (None, "corrupt_document"),
    ]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "file_data"),
        ({"file_data": "QQ==", "url": "http://x/y"}, "file_data"),
        ({"files": []}, "files"),
        ({"files": [{"file_data": "QQ=="}] * 5}, "files"),
        ({"files": [{"file_data": "QQ=="}], "file_id": "file-1"}, "files"),
        ({"files": [{"file_data": "QQ=="}, {"filename": "a"}]}, "files[1]"),
        ({"file_data": 5}, "file_data"),
        ({"file_data": "QQ==", "length": "huge"}, "length"),
        ({"file_data": "QQ==", "colour": "red"}, "colour"),
    ],
)
def test_a_body_that_does_not_say_which_document_is_refused(ask: Any, body: dict[str, Any], param: str) -> None:
    response = ask(json=body)
    assert error_code(response) == (400, "invalid_request")
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("content", [b"", b"[1]", b"null", b"{", b"\xff", b'{"file_data": "\\ud800"}'])
def test_a_body_that_is_no_json_object_is_refused(ask: Any, content: bytes) -> None:
    assert error_code(ask(content=content, headers={"content-type": "application/json"})) == (400, "invalid_request")


def test_a_body_in_json_has_the_limit_of_json(ask: Any) -> None:
    assert error_code(ask(json={"file_data": "Q" * 5000})) == (413, "body_too_large")
    assert ask(files={"file": TEXT + b" " * 5000}).status_code == 200


def test_an_equal_request_is_answered_from_the_cache(reader: PageReader) -> None:
    engine = scripted()
    with serving(engine, reader=reader, middleware=OwnerByHeader) as server:
        post = functools.partial(httpx.post, server.url + SUMMARY, timeout=60)
        first = post(files={"file": ("a.txt", TEXT)}).json()
        num_asked = len(engine.started)
        again = post(files={"file": ("b.txt", TEXT)}).json()
        assert (first["cached"], again["cached"]) == (False, True)
        assert again == {**first, "name": "b.txt", "cached": True}
        events = events_of(post(files={"file": ("c.txt", TEXT)}, data={"stream": "true"}).text)
        assert [name for name, _ in events] == ["delta", "result", "done"]
        assert events[0][1]["text"] == events[1][1]["result"]["text"] == first["text"]
        assert events[1][1]["result"]["cached"] is True
        assert len(engine.started) == num_asked
        assert post(files={"file": ("a.txt", TEXT)}, headers={"x-owner": "bob"}).json()["cached"] is False
        assert post(files={"file": ("a.txt", TEXT)}, data={"length": "long"}).json()["cached"] is False
        assert post(files={"file": ("a.txt", TEXT + b"More.")}).json()["cached"] is False


def test_no_cache_asks_again_and_stores_anew(reader: PageReader) -> None:
    engine = scripted()
    with serving(engine, reader=reader) as server:
        post = functools.partial(httpx.post, server.url + SUMMARY, files={"file": ("a.txt", TEXT)}, timeout=60)
        before = post().json()["text"]
        engine.answer = "It is due on 12 March."
        fresh = post(data={"no_cache": "true"}).json()
        assert fresh["cached"] is False
        assert fresh["text"] != before
        assert post().json() == {**fresh, "cached": True}


@pytest.mark.parametrize(
    ("options", "is_cached"),
    [({"temperature": "0.7"}, False), ({"temperature": "0.7", "seed": "5"}, True), ({"temperature": "0"}, True)],
)
def test_only_what_would_be_answered_alike_is_cached(
    reader: PageReader, options: dict[str, str], is_cached: bool
) -> None:
    with serving(scripted(), reader=reader) as server:
        answers = [
            httpx.post(server.url + SUMMARY, files={"file": TEXT}, data=options, timeout=60).json() for _ in range(2)
        ]
    assert [answer["cached"] for answer in answers] == [False, is_cached]


@pytest.mark.parametrize("method", ["get", "put"])
def test_a_cache_that_cannot_be_had_costs_no_answer(
    reader: PageReader, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    async def fail(*_: Any, **__: Any) -> None:
        raise StorageError("storage_full", "the disk is full")

    monkeypatch.setattr(ResultCache, method, fail)
    with serving(scripted(), reader=reader) as server:
        response = httpx.post(server.url + SUMMARY, files={"file": TEXT}, timeout=60)
    assert response.status_code == 200
    assert ANSWER in response.json()["text"]


def test_chat_takes_a_stored_file_of_its_owner_alone(reader: PageReader) -> None:
    engine = scripted()
    with serving(engine, reader=reader, middleware=OwnerByHeader) as server:
        ann, bob = {"x-owner": "ann"}, {"x-owner": "bob"}
        files = {"file": ("a.txt", TEXT)}
        file_id = httpx.post(f"{server.url}/v1/files", files=files, headers=ann, timeout=60).json()["id"]
        parts = [{"type": "file", "file": {"file_id": file_id}}, {"type": "text", "text": "What is the total?"}]
        body = {"messages": [{"role": "user", "content": parts}]}
        chat = functools.partial(httpx.post, f"{server.url}/v1/chat/completions", json=body, timeout=60)
        assert chat(headers=ann).status_code == 200
        assert "1,284.50" in engine.prompts[-1]
        assert error_code(chat(headers=bob)) == (404, "not_found")


def test_every_task_has_its_route_and_names_what_it_misses(api: httpx.Client) -> None:
    unanswered = api.post("/v1/ask", files={"file": TEXT})
    assert error_code(unanswered) == (400, "invalid_request")
    assert unanswered.json()["error"]["param"] == "question"
    answered = api.post("/v1/ask", files={"file": TEXT}, data={"question": "What is the total?"})
    assert answered.status_code == 200, answered.text
    assert (answered.json()["object"], answered.json()["found"]) == ("answer", True)
    assert answered.json()["cached"] is False
