"""What nobody sends by mistake: each such request fails for its sender alone, and with an error of its own."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from document_server import TEXT, error_code, events_of, scripted
from live_server import LiveServer, serving, wait_until

from mmserve.vision.pages import PageReader

pytest_plugins = ["document_fixtures"]

LEVELS = 10_000
BRANCHES: dict[str, Any] = {
    f"d{level}": {"allOf": [{"$ref": f"#/$defs/d{level + 1}"}] * 3} for level in range(1, 25)
} | {"d25": {"type": "object"}}
BOMB = {"type": "object", "properties": {"a": {}}, "$ref": "#/$defs/d1", "$defs": BRANCHES}


@pytest.fixture(scope="module")
def server(reader: PageReader, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serving(scripted(), reader=reader, data_dir=tmp_path_factory.mktemp("data")) as live:
        yield live


@pytest.fixture
def file_id(api: httpx.Client) -> str:
    return str(api.post("/v1/files", files={"file": ("a.txt", TEXT)}).json()["id"])


def sent(api: httpx.Client, path: str, body: str) -> tuple[int, str]:
    return error_code(api.post(path, content=body, headers={"content-type": "application/json"}))


@pytest.mark.parametrize("path", ["/v1/summarize", "/v1/extract", "/v1/jobs", "/v1/chat/completions"])
@pytest.mark.parametrize("start", ["", '{"a": "\\ud800", "b": '])
def test_json_of_too_many_levels_is_bad_input(api: httpx.Client, path: str, start: str) -> None:
    body = start + "[" * LEVELS + "]" * LEVELS + ("}" if start else "")
    assert sent(api, path, body) == (400, "invalid_request")


@pytest.mark.parametrize("pages", ["9" * 5000, "1-" + "9" * 5000])
def test_a_page_number_of_any_length_is_bad_input(api: httpx.Client, file_id: str, pages: str) -> None:
    body = {"file_id": file_id, "pages": pages}
    assert error_code(api.post("/v1/transcribe", json=body)) == (400, "invalid_request")


@pytest.mark.parametrize("value", ["NaN", "1e999", '"\\ud800"'])
def test_a_schema_has_only_what_json_has(api: httpx.Client, file_id: str, value: str) -> None:
    schema = '{"type": "object", "properties": {"a": {"const": VALUE}}}'.replace("VALUE", value)
    form = {"task": "extract", "schema": schema}
    assert error_code(api.post("/v1/jobs", data=form, files={"file": ("a.txt", TEXT)})) == (400, "invalid_schema")
    job = f'{{"task": "extract", "file_ids": ["{file_id}"], "options": {{"schema": {schema}}}}}'
    assert sent(api, "/v1/jobs", job)[0] == 400


def test_a_schema_that_doubles_at_each_level_is_refused(api: httpx.Client, file_id: str) -> None:
    assert sent(api, "/v1/extract", json.dumps({"file_id": file_id, "schema": BOMB})) == (400, "invalid_schema")
    many = {"type": "object", "properties": {f"p{place}": {} for place in range(1001)}}
    assert sent(api, "/v1/extract", json.dumps({"file_id": file_id, "schema": many})) == (400, "invalid_schema")


@pytest.mark.parametrize("charset", ["undefined", "unicode_escape", "punycode", "utf-16"])
def test_a_form_is_in_utf_8(api: httpx.Client, charset: str) -> None:
    parts = [
        b'Content-Disposition: form-data; name="file"; filename="a.txt"\r\n\r\n' + TEXT,
        b'Content-Disposition: form-data; name="prompt"\r\n\r\n\\ud800',
    ]
    body = b"".join(b"--x\r\n" + part + b"\r\n" for part in parts) + b"--x--\r\n"
    headers = {"content-type": f"multipart/form-data; boundary=x; charset={charset}"}
    assert error_code(api.post("/v1/summarize", content=body, headers=headers)) == (415, "unsupported_type")


def test_an_event_number_that_no_database_has_is_bad_input(api: httpx.Client, file_id: str) -> None:
    job_id = api.post("/v1/jobs", json={"task": "transcribe", "file_ids": [file_id]}).json()["id"]
    events = f"/v1/jobs/{job_id}/events"
    assert error_code(api.get(events, headers={"Last-Event-ID": str(2**63)})) == (400, "invalid_request")
    assert error_code(api.get(events, params={"after": 2**31})) == (400, "invalid_request")
    assert api.get(events, params={"after": 2**31 - 1}).status_code == 200


def test_a_number_of_any_length_stands_in_a_document(api: httpx.Client) -> None:
    text = b"The total is " + b"9" * 5000 + b" euros in this year and it is due in March.\n"
    assert api.post("/v1/summarize", files={"file": ("a.txt", text)}).status_code == 200


def test_a_file_that_is_deleted_while_it_is_sent_is_sent_whole(reader: PageReader, tmp_path: Path) -> None:
    content = b"A line of a long text.\n" * 500_000
    with serving(scripted(), reader=reader, data_dir=tmp_path) as live, httpx.Client(base_url=live.url) as api:
        file_id = api.post("/v1/files", files={"file": ("a.txt", content)}, timeout=60).json()["id"]
        with api.stream("GET", f"/v1/files/{file_id}/content") as response:
            assert httpx.delete(f"{live.url}/v1/files/{file_id}").status_code == 200
            assert b"".join(response.iter_bytes()) == content


def test_what_is_made_of_a_deleted_file_is_not_kept(reader: PageReader, tmp_path: Path) -> None:
    engine = scripted(seconds_per_token=0.02)
    with serving(engine, reader=reader, data_dir=tmp_path) as live, httpx.Client(base_url=live.url) as api:
        file_id = api.post("/v1/files", files={"file": ("a.txt", TEXT)}).json()["id"]
        body = {"file_id": file_id, "stream": "true"}
        with api.stream("POST", "/v1/summarize", json=body) as response:
            wait_until(lambda: engine.started)
            assert httpx.delete(f"{live.url}/v1/files/{file_id}").status_code == 200
            assert "done" in dict(events_of(response.read().decode()))
        again = api.post("/v1/summarize", files={"file": ("a.txt", TEXT)}, timeout=60)
        assert again.json()["cached"] is False


def test_what_a_deleted_file_is_asked_is_not_found(reader: PageReader, tmp_path: Path) -> None:
    with serving(scripted(), reader=reader, data_dir=tmp_path) as live, httpx.Client(base_url=live.url) as api:
        content = (Path(__file__).parents[2] / "samples" / "invoice.pdf").read_bytes()
        file_id = api.post("/v1/files", files={"file": ("a.pdf", content)}).json()["id"]
        for path in tmp_path.glob("files/*/*/content"):
            path.unlink()
        file = f"/v1/files/{file_id}"
        assert error_code(api.get(f"{file}/content")) == (404, "not_found")
        assert error_code(api.get(f"{file}/pages/1", timeout=60)) == (404, "not_found")
        assert error_code(api.post("/v1/summarize", json={"file_id": file_id})) == (404, "not_found")
        job_id = api.post("/v1/jobs", json={"task": "summarize", "file_ids": [file_id]}).json()["id"]
        wait_until(lambda: api.get(f"/v1/jobs/{job_id}").json()["status"] == "failed")
        assert api.get(f"/v1/jobs/{job_id}").json()["error"]["code"] == "not_found"
