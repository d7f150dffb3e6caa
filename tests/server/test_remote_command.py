"""`mmserve ... --server`: the command line against a server on a real socket, whose engine answers by script."""

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from live_server import LiveServer, serving
from scripted_engine import ScriptedEngine
from starlette.responses import JSONResponse, Response, StreamingResponse
from typer.testing import CliRunner, Result

from mmserve import cli
from mmserve.commands import documents
from mmserve.errors import EngineError
from mmserve.server.runner import DrainingServer
from mmserve.server.settings import ServerSettings
from mmserve.vision.pages import PageReader

pytest_plugins = ["document_fixtures"]

TEXT = "Invoice of Hallam Pumps. The total is 1,284.50 EUR. It is due on 12 March.\n"
ANSWER = "The total is 1,284.50 EUR."


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, and no way to load a model."""

    def refuse(_options: object) -> Any:
        raise AssertionError("a model is being loaded")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(documents, "started_engine", refuse)
    monkeypatch.setattr("mmserve.pipelines.batch._Batch._delay", lambda _batch, _attempt: 0.0)
    return tmp_path


def scripted(**changes: Any) -> ScriptedEngine:
    return ScriptedEngine(**{"answer": ANSWER, "max_model_len": 30_000, **changes})


def mmserve(*arguments: str, input: bytes | None = None) -> Result:
    return CliRunner().invoke(cli.app, list(arguments), input=input, prog_name="mmserve")


def local_summary(reader: PageReader, path: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> Result:
    """The same command in this process."""
    from contextlib import contextmanager

    @contextmanager
    def start(_options: object) -> Iterator[ScriptedEngine]:
        yield scripted()

    with monkeypatch.context() as patch:
        patch.setattr(documents, "started_engine", start)
        patch.setattr("mmserve.commands.options.VisionOptions.open_prompts", lambda *_: _Prompts())
        return mmserve("summarize", str(path), "-q", *options)


class _Prompts:
    reads_images = False

    def close(self) -> None:
        pass

    def build(self, messages: Any) -> Any:
        from contextlib import asynccontextmanager
        from types import SimpleNamespace

        @asynccontextmanager
        async def built() -> Any:
            yield SimpleNamespace(token_ids=scripted().tokenizer.encode_chat(messages), images=())

        return built()


@pytest.mark.parametrize("output_format", ["md", "json"])
def test_results_are_those_of_this_process(
    reader: PageReader, monkeypatch: pytest.MonkeyPatch, output_format: str
) -> None:
    Path("invoice.txt").write_text(TEXT)
    with serving(scripted(), reader=reader) as server:
        remote = mmserve("summarize", "invoice.txt", "--server", server.url, "-q", "-f", output_format)
    local = local_summary(reader, Path("invoice.txt"), monkeypatch, "-f", output_format)
    assert remote.exit_code == local.exit_code == 0, remote.stderr + local.stderr
    if output_format == "json":
        known = json.loads(local.stdout)
        assert {name: json.loads(remote.stdout)[name] for name in known} == known
    else:
        assert remote.stdout == local.stdout
        assert f"{ANSWER} [p. 1]" in remote.stdout


def test_options_travel_as_fields_and_outputs_are_written_here(reader: PageReader) -> None:
    engine = scripted()
    Path("in/sub").mkdir(parents=True)
    Path("in/sub/a.txt").write_text(f"First page.\f{TEXT}")
    with serving(engine, reader=reader) as server:
        arguments = [
            "in",
            "-r",
            "-o",
            "out",
            "--pages",
            "2",
            "--prompt",
            "Amounts, please.",
            "--max-tokens",
            "40",
            "-q",
        ]
        assert mmserve("summarize", *arguments, "--server", server.url).exit_code == 0
        assert mmserve("summarize", *arguments, "--server", server.url, "--resume").exit_code == 0
    assert Path("out/sub/a.txt.md").read_text().startswith("# sub/a.txt\n")
    assert "[p. 2]" in Path("out/sub/a.txt.md").read_text()
    assert len(engine.prompts) == 1
    assert "Amounts, please." in engine.prompts[0]
    assert engine.params[0].max_tokens == 40


def test_standard_input_goes_to_the_server(reader: PageReader) -> None:
    with serving(scripted(), reader=reader) as server:
        result = mmserve("summarize", "-", "-f", "json", "-q", "--server", server.url, input=TEXT.encode())
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["name"] == "stdin"


def test_a_documents_error_is_its_own_with_the_servers_code(reader: PageReader) -> None:
    Path("in").mkdir()
    Path("in/a.txt").write_text(TEXT)
    Path("in/b.pdf").write_bytes(b"%PDF-1.7\n" + b"\x00" * 200)
    with serving(scripted(), reader=reader) as server:
        result = mmserve("summarize", "in", "-o", "out", "--report", "errors.jsonl", "-q", "--server", server.url)
    assert result.exit_code == 1
    assert Path("out/a.txt.md").exists()
    (failure,) = (json.loads(line) for line in Path("errors.jsonl").read_text().splitlines())
    assert (failure["path"], failure["code"]) == ("in/b.pdf", "corrupt_document")


def test_a_model_that_is_not_served_is_said(reader: PageReader) -> None:
    Path("a.txt").write_text(TEXT)
    with serving(scripted(), reader=reader) as server:
        result = mmserve("summarize", "a.txt", "--model", "org/other", "--server", server.url)
        assert mmserve("summarize", "a.txt", "--model", "org/alias", "-q", "--server", server.url).exit_code == 0
    assert result.exit_code == 1
    assert "org/other" in result.stderr
    assert "model_not_found" in result.stderr


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://no-such-host.invalid"])
def test_no_server_is_a_sentence(url: str) -> None:
    Path("a.txt").write_text(TEXT)
    result = mmserve("summarize", "a.txt", "--server", url)
    assert result.exit_code == 3
    assert result.stderr.startswith(f"mmserve: no answer from {url} (")
    assert "start a server with mmserve serve" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--server", "localhost:8000"], "--server needs a URL"),
        (["--server", "http://[::1"], "--server needs a URL"),
        (["--server", "http://localhost:1", "--api-key", "é"], "--api-key has visible"),
        (["--server", "http://localhost:1", "--prompt", "\udcff"], "prompt has bytes that are no text"),
        (["--no-cache"], "--no-cache goes with --server"),
    ],
)
def test_usage_errors(arguments: list[str], sentence: str) -> None:
    Path("a.txt").write_text(TEXT)
    result = mmserve("summarize", "a.txt", *arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr


class Answers:
    """A server that answers requests for tasks by script, and remembers their forms."""

    def __init__(self, *answers: Response) -> None:
        self.forms: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self._answers = list(answers)
        self.app = FastAPI()
        self.app.add_api_route("/v1/models", self._models)
        self.app.add_api_route("/v1/transcribe", self._task, methods=["POST"], response_model=None)

    async def _models(self) -> dict[str, Any]:
        return {"data": []}

    async def _task(self, request: Request) -> Response:
        self.keys.append(request.headers.get("authorization"))
        async with request.form() as form:
            self.forms.append({key: value if isinstance(value, str) else value.filename for key, value in form.items()})
        return self._answers.pop(0)


class Serving(LiveServer):
    def __init__(self, app: FastAPI) -> None:
        drain = SimpleNamespace(begin=lambda _seconds: None)
        app.state.server = SimpleNamespace(drain=drain, jobs=contextlib.nullcontext())
        super().__init__(app, ServerSettings(shutdown_timeout=0.2))
        assert isinstance(self.server, DrainingServer)


@pytest.fixture
def answering() -> Iterator[Any]:
    started: list[Serving] = []

    def serve(*answers: Response) -> tuple[Answers, str]:
        scripted_answers = Answers(*answers)
        started.append(Serving(scripted_answers.app))
        started[-1].start()
        return scripted_answers, started[-1].url

    yield serve
    for server in started:
        server.stop()


def refusal(status: int, code: str, message: str, **headers: str) -> Response:
    error = {"message": message, "type": "", "param": None, "code": code}
    return JSONResponse({"error": error}, status, {name.replace("_", "-"): value for name, value in headers.items()})


def events(*data: dict[str, Any], chunk: int = 7) -> Response:
    """An event stream in pieces that part frames and characters anywhere."""
    text = ": a comment\n\n" + "".join(
        f"event: {one['type']}\ndata: {json.dumps(one, ensure_ascii=False)}\n\n" for one in data
    )

    async def pieces() -> Any:
        body = text.encode()
        for start in range(0, len(body), chunk):
            yield body[start : start + chunk]

    return StreamingResponse(pieces(), media_type="text/event-stream")


PAGE = {"number": 1, "source": "ocr", "is_blank": False, "problem": None, "notes": [], "markdown": "Straße\u2028"}
DAMAGED_PAGE = {**PAGE, "number": 2, "problem": {"code": "corrupt_document", "message": "It is cut off."}}
RESULT = {
    "object": "transcript",
    "name": "a.txt",
    "text": "<!-- page 1 -->\n\nStraße\u2028",
    "pages": [PAGE, DAMAGED_PAGE],
    "num_pages": 2,
    "model": "org/model",
    "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
    "warnings": ["Page 2 could not be read."],
    "media_type": "text/plain",
    "sha256": "ab" * 32,
    "cached": True,
}
PROGRESS = {"type": "progress", "index": 0, "name": "a.txt", "event": "page_read", "num_read": 1, "num_pages": 2}


def test_a_transcript_comes_as_it_would_here_and_its_problems_are_told(answering: Any) -> None:
    Path("a.txt").write_text(TEXT)
    server, url = answering(
        events(PROGRESS, {"type": "result", "result": RESULT}), events({"type": "result", "result": RESULT})
    )
    result = mmserve("transcribe", "a.txt", "--server", url, "--api-key", "sk-1", "--no-cache", "--mode", "text")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == (
        "<!-- a.txt -->\n\n<!-- page 1 -->\n\nStraße\u2028\n\n<!-- note: Page 2 could not be read. -->\n"
    )
    assert result.stderr == "mmserve: a.txt, page 2: It is cut off. (corrupt_document)\n"
    assert server.keys == ["Bearer sk-1"]
    form = server.forms[0]
    assert (form["file"], form["stream"], form["no_cache"], form["mode"]) == ("a.txt", "true", "true", "text")
    assert "model" not in form
    assert json.loads(mmserve("transcribe", "a.txt", "--server", url, "-f", "json", "-q").stdout) == RESULT


def test_the_key_may_come_from_the_environment(answering: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("a.txt").write_text(TEXT)
    monkeypatch.setenv("MMSERVE_API_KEY", "sk-2")
    server, url = answering(events({"type": "result", "result": RESULT}))
    assert mmserve("transcribe", "a.txt", "--server", url, "-q").exit_code == 0
    assert server.keys == ["Bearer sk-2"]


def test_an_overloaded_server_is_asked_again_when_it_says(answering: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    delays: list[float] = []

    async def note(delay: float) -> None:
        delays.append(delay)

    Path("a.txt").write_text(TEXT)
    server, url = answering(
        refusal(429, "rate_limited", "Slow down.", Retry_After="3"),
        refusal(503, "shutting_down", "Stopping.", Retry_After="9"),
        events({"type": "result", "result": RESULT}),
    )
    monkeypatch.setattr("mmserve.pipelines.batch._sleep", note)
    assert mmserve("transcribe", "a.txt", "--server", url, "-q").exit_code == 0
    assert delays == [3.0, 9.0]
    assert len(server.forms) == 3


def test_what_does_not_heal_is_asked_once(answering: Any) -> None:
    Path("a.txt").write_text(TEXT)
    server, url = answering(refusal(422, "password_required", "a.txt is locked."))
    result = mmserve("transcribe", "a.txt", "--server", url)
    assert result.exit_code == 1
    assert "a.txt is locked. (password_required)" in result.stderr
    assert len(server.forms) == 1


@pytest.mark.parametrize(
    "answer",
    [
        events(PROGRESS),
        events(PROGRESS, {"type": "error", "error": {"code": "queue_full", "message": "Too many."}}),
        events({"type": "result", "result": {"object": "transcript", "text": "x"}}),
        refusal(502, "", "<html>"),
    ],
    ids=["cut", "error", "other-version", "proxy"],
)
def test_an_answer_that_ends_badly_is_asked_for_again_or_reported(answering: Any, answer: Response) -> None:
    Path("a.txt").write_text(TEXT)
    server, url = answering(answer)
    result = mmserve("transcribe", "a.txt", "--server", url, "--retries", "0")
    assert result.exit_code == 1
    assert "a.txt" in result.stderr
    assert "Traceback" not in result.stderr
    assert len(server.forms) == 1


def test_a_server_that_is_gone_ends_the_run(reader: PageReader, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("in").mkdir()
    for name in "abcdef":
        Path(f"in/{name}.txt").write_text(f"{TEXT} {name}")
    real, num_sent = httpx.AsyncClient.stream, 0

    def failing(client: httpx.AsyncClient, *arguments: Any, **options: Any) -> Any:
        nonlocal num_sent
        num_sent += 1
        if num_sent > 2:
            raise httpx.ConnectError("connection refused")
        return real(client, *arguments, **options)

    monkeypatch.setattr(httpx.AsyncClient, "stream", failing)
    monkeypatch.setattr("mmserve.pipelines.batch._sleep", lambda _delay: asyncio.sleep(0))
    with serving(scripted(), reader=reader) as server:
        result = mmserve("summarize", "in", "-o", "out", "-j", "1", "-q", "--server", server.url)
    assert result.exit_code == 1
    assert "cannot be reached any more" in result.stderr
    assert sorted(path.name for path in Path("out").glob("*.md")) == ["a.txt.md", "b.txt.md"]
    assert num_sent == 2 + 3


def test_an_engine_that_fails_at_the_server_fails_its_document(reader: PageReader) -> None:
    Path("a.txt").write_text(TEXT)
    engine = scripted(failure=EngineError("internal_error", "A fault."), fail_after=3)
    with serving(engine, reader=reader) as server:
        result = mmserve("summarize", "a.txt", "--server", server.url)
    assert result.exit_code == 1
    assert "A fault. (internal_error)" in result.stderr
