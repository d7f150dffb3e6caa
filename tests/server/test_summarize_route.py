"""`/v1/summarize` over a real socket, with the real pipeline and page reader; only the engine is scripted."""

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import LiveServer, serving, wait_until
from scripted_engine import ScriptedEngine

from mmserve.errors import EngineError
from mmserve.vision.pages import PageReader

TEXT = b"Invoice of Hallam Pumps. The total is 1,284.50 EUR. It is due on 12 March.\n"
ANSWER = "The total is 1,284.50 EUR."
DAMAGED = b"%PDF-1.7\n" + b"\x00" * 200


class WatchedReader(PageReader):
    """Remembers the paths that it was asked to open, and the modes of their folders."""

    def __init__(self) -> None:
        super().__init__(num_workers=1)
        self.opened: list[tuple[Path, int]] = []

    async def open(self, path: Path, *, name: str | None = None) -> Any:
        self.opened.append((path, _mode(path.parent)))
        return await super().open(path, name=name)


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(scope="module")
def reader() -> Iterator[WatchedReader]:
    made = WatchedReader()
    yield made
    made.close()


@pytest.fixture(scope="module")
def upload_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("uploads")


def scripted(**changes: Any) -> ScriptedEngine:
    return ScriptedEngine(**{"answer": ANSWER, "max_model_len": 30_000, **changes})


@pytest.fixture(scope="module")
def server(reader: WatchedReader, upload_dir: Path) -> Iterator[LiveServer]:
    with serving(scripted(), reader=reader, upload_dir=upload_dir, max_files=4) as live:
        yield live


@pytest.fixture(autouse=True)
def _nothing_is_left(upload_dir: Path) -> Iterator[None]:
    yield
    wait_until(lambda: not list(upload_dir.iterdir()))


def post(server: LiveServer, *files: tuple[str, bytes], field: str = "file", **options: str) -> httpx.Response:
    parts = [(field, (name, content)) for name, content in files]
    return httpx.post(f"{server.url}/v1/summarize", files=parts, data=options, timeout=60)


def events_of(response: httpx.Response) -> list[tuple[str, dict[str, Any]]]:
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for frame in response.text.strip().split("\n\n"):
        name, data = frame.split("\n")
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return events


def test_one_file_gives_its_summary(server: LiveServer) -> None:
    response = post(server, ("invoice.txt", TEXT))
    assert response.status_code == 200, response.text
    result = response.json()
    assert result["name"] == "invoice.txt"
    assert "The total is 1,284.50 EUR. [p. 1]" in result["text"]
    assert result["num_pages"] == 1
    assert result["model"] == "scripted"
    assert result["usage"]["prompt_tokens"] > 0


@pytest.mark.parametrize("field", ["file", "files", "files[]"])
def test_several_files_give_a_list_in_which_only_the_bad_one_failed(server: LiveServer, field: str) -> None:
    response = post(server, ("a.txt", TEXT), ("bad.pdf", DAMAGED), ("a.txt", TEXT), field=field)
    assert response.status_code == 200
    first, bad, last = response.json()["data"]
    assert "[p. 1]" in first["text"]
    assert last["text"] == first["text"]
    assert bad["name"] == "bad.pdf"
    assert bad["error"]["code"] == "corrupt_document"


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [(DAMAGED, 422, "corrupt_document"), (b"", 422, "empty_document"), (b"\x7fELF\0\1\2", 415, "unsupported_type")],
)
@pytest.mark.parametrize("stream", ["false", "true"])
def test_a_file_that_came_alone_fails_with_the_status_of_its_fault(
    server: LiveServer, content: bytes, status: int, code: str, stream: str
) -> None:
    response = post(server, ("x.pdf", content), stream=stream)
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert "x.pdf" in response.json()["error"]["message"]


def test_a_stream_tells_progress_text_results_errors_and_the_end(server: LiveServer) -> None:
    events = events_of(post(server, ("a.txt", TEXT), ("bad.pdf", DAMAGED), stream="true", no_cache="true"))
    names = [name for name, _ in events]
    assert {"progress", "delta", "result", "error"} <= set(names)
    assert names[-1] == "done"
    assert all(name == data["type"] for name, data in events)
    of_good = [data for name, data in events if data.get("index") == 0]
    result = next(data["result"] for data in of_good if data["type"] == "result")
    assert {data["name"] for data in of_good} == {"a.txt"}
    assert "".join(data["text"] for data in of_good if data["type"] == "delta") == result["text"]
    assert "page_read" in [data["event"] for data in of_good if data["type"] == "progress"]
    failed = next(data for name, data in events if name == "error")
    assert (failed["index"], failed["name"], failed["error"]["code"]) == (1, "bad.pdf", "corrupt_document")


def test_options_reach_the_pipeline(reader: WatchedReader) -> None:
    engine = scripted()
    with serving(engine, reader=reader) as server:
        response = post(
            server, ("a.txt", TEXT), prompt="Look for dates.", max_tokens="77", pages="1", length="", seed="5"
        )
    assert response.status_code == 200
    assert (engine.params[-1].max_tokens, engine.params[-1].seed) == (77, 5)
    assert "Look for dates." in engine.prompts[-1]


@pytest.mark.parametrize(
    ("options", "status", "param"),
    [
        ({"pages": "9-"}, 400, "pages"),
        ({"pages": "one"}, 400, "pages"),
        ({"max_tokens": "many"}, 400, "max_tokens"),
        ({"max_tokens": "0"}, 400, "max_tokens"),
        ({"length": "huge"}, 400, "length"),
        ({"stream": "perhaps"}, 400, "stream"),
        ({"colour": "red"}, 400, "colour"),
        ({"model": "gpt-9"}, 404, "model"),
    ],
)
def test_wrong_options_are_named(server: LiveServer, options: dict[str, str], status: int, param: str) -> None:
    response = post(server, ("a.txt", TEXT), **options)
    assert response.status_code == status
    assert response.json()["error"]["param"] == param


def test_what_is_no_upload_is_told_how_to_be_one(server: LiveServer) -> None:
    url = f"{server.url}/v1/summarize"
    boundary = {"content-type": "multipart/form-data; boundary=b"}
    field = b'--b\r\nContent-Disposition: form-data; name="%b"\r\n\r\ntext\r\n--b--\r\n'
    as_text = httpx.post(url, content=b"a", headers={"content-type": "text/plain"})
    assert (as_text.status_code, as_text.json()["error"]["code"]) == (415, "unsupported_type")
    for content in (field % b"other", field % b"file", b"--b\r\nnonsense", b"", b"--b--\r\n"):
        refused = httpx.post(url, content=content, headers=boundary)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_request")
    no_boundary = httpx.post(url, content=b"x", headers={"content-type": "multipart/form-data"})
    assert (no_boundary.status_code, no_boundary.json()["error"]["code"]) == (400, "invalid_request")
    elsewhere = post(server, ("a.txt", TEXT), field="document")
    assert (elsewhere.status_code, elsewhere.json()["error"]["param"]) == (400, "document")
    too_many = post(server, *[("a.txt", TEXT)] * 5)
    assert too_many.status_code == 400
    assert "4" in too_many.json()["error"]["message"]


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ("../../etc/passwd", "passwd"),
        ("C:\\letters\\to\\bob.txt", "bob.txt"),
        ("Überweisung 東京.txt", "Überweisung 東京.txt"),
        ("a\u202etxt.exe", "atxt.exe"),
        ("..", "file-1"),
        ("x" * 2000, "x" * 255),
    ],
)
def test_a_name_is_only_shown(
    server: LiveServer, reader: WatchedReader, upload_dir: Path, sent: str, shown: str
) -> None:
    response = post(server, (sent, TEXT))
    assert response.status_code == 200, response.text
    assert response.json()["name"] == shown
    path, folder_mode = reader.opened[-1]
    assert path.parent.parent == upload_dir
    assert len(path.name) == 32
    assert folder_mode == 0o700
    assert not path.exists()


def test_the_form_is_documented(server: LiveServer) -> None:
    operation = httpx.get(f"{server.url}/openapi.json").json()["paths"]["/v1/summarize"]["post"]
    properties = operation["requestBody"]["content"]["multipart/form-data"]["schema"]["properties"]
    assert {"file", "pages", "prompt", "length", "language", "max_tokens", "stream", "model"} <= set(properties)
    assert {"413", "415", "422", "429"} <= set(operation["responses"])


@pytest.mark.parametrize("stream", ["false", "true"])
def test_a_client_that_leaves_aborts_the_engines_work(reader: WatchedReader, upload_dir: Path, stream: str) -> None:
    engine = scripted(seconds_per_token=0.5)
    with serving(engine, reader=reader, upload_dir=upload_dir) as server:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{server.url}/v1/summarize", files={"file": ("a.txt", TEXT)}, data={"stream": stream}, timeout=1.0
            )
        wait_until(lambda: engine.aborted)
        wait_until(lambda: not list(upload_dir.iterdir()))
    assert engine.finished == []


@pytest.mark.parametrize("stream", ["false", "true"])
def test_a_dead_engine_is_503_for_one_file_and_an_entry_among_several(reader: WatchedReader, stream: str) -> None:
    engine = scripted(failure=EngineError("engine_dead", "the engine died"))
    with serving(engine, reader=reader) as server:
        several = post(server, ("a.txt", TEXT), ("b.txt", TEXT))
        alone = post(server, ("a.txt", TEXT), stream=stream)
    assert [entry["error"]["code"] for entry in several.json()["data"]] == ["engine_dead"] * 2
    if stream == "true":
        assert [(name, data.get("error", {}).get("code")) for name, data in events_of(alone)[-2:]] == [
            ("error", "engine_dead"),
            ("done", None),
        ]
    else:
        assert alone.status_code == 503


def test_documents_beyond_the_queue_are_429(reader: WatchedReader) -> None:
    with serving(scripted(), reader=reader) as server:
        server.app.state.server.document_gate.num_in_flight = 6
        assert post(server, ("a.txt", TEXT)).status_code == 429
        assert post(server, ("a.txt", TEXT), stream="true").status_code == 429
