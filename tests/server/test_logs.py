"""Log lines: their form, the request's id in them, and what never stands in them."""

import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from live_server import serving, wait_until
from scripted_engine import failing
from test_serve_command import ServeProcess, serving_process
from vision_checkpoint import save_vision_model

from mmserve.errors import DocumentError, frames_of
from mmserve.server.logs import JsonFormatter, TextFormatter
from mmserve.server.request_id import REQUEST_ID

SAMPLES = Path(__file__).parents[2] / "samples"
MARK = "XYZZY"


def record_of(error: Exception | None = None, **fields: Any) -> logging.LogRecord:
    info = None if error is None else (type(error), error, error.__traceback__)
    record = logging.LogRecord("mmserve.some", logging.WARNING, __file__, 1, "%d pages", (3,), info)
    if fields:
        record.fields = fields
    return record


def raised(error: Exception) -> Exception:
    try:
        try:
            raise KeyError(f"{MARK} inside")
        except KeyError as inner:
            raise error from inner
    except Exception as caught:
        return caught


@contextmanager
def within_request(request_id: str) -> Iterator[None]:
    token = REQUEST_ID.set(request_id)
    try:
        yield
    finally:
        REQUEST_ID.reset(token)


def test_a_line_of_json_has_its_parts() -> None:
    with within_request("req-7"):
        text = JsonFormatter().format(record_of(task="ask", num_pages=4))
    assert "\n" not in text
    line = json.loads(text)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", line.pop("time"))
    assert line == {
        "level": "warning",
        "logger": "mmserve.some",
        "message": "3 pages",
        "request_id": "req-7",
        "task": "ask",
        "num_pages": 4,
    }
    assert "request_id" not in json.loads(JsonFormatter().format(record_of()))


def test_a_line_of_text_has_them_as_well() -> None:
    with within_request("req-7"):
        text = TextFormatter().format(record_of(status=200, task="ask", num_pages=4))
    assert text == "WARNING mmserve.some: 3 pages task=ask num_pages=4 [req-7]"


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()], ids=["text", "json"])
def test_exceptions_are_named_and_placed_but_not_quoted(formatter: logging.Formatter) -> None:
    text = formatter.format(record_of(raised(ValueError(f"{MARK} outside"))))
    assert MARK not in text
    for part in ("ValueError", "KeyError", "test_logs.py", "in raised"):
        assert part in text


def test_of_our_errors_the_code_is_shown_and_of_the_systems_their_reason() -> None:
    assert frames_of(DocumentError("corrupt_document", MARK)) == "DocumentError: corrupt_document"
    assert frames_of(OSError(28, "No space left on device", MARK)) == "OSError: No space left on device"


def test_a_fault_of_the_server_is_logged_without_its_words() -> None:
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(JsonFormatter())
    logging.getLogger().addHandler(handler)
    try:
        with serving(failing(ValueError(MARK), after=0)) as server:
            body: Any = {"messages": [{"role": "user", "content": "hi"}]}
            headers = {"X-Request-Id": "mine-1"}
            response = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers)
    finally:
        logging.getLogger().removeHandler(handler)
    assert response.status_code == 500
    assert MARK not in written.getvalue()
    (line,) = [json.loads(text) for text in written.getvalue().splitlines() if '"exception"' in text]
    assert (line["level"], line["request_id"], "ValueError" in line["exception"]) == ("error", "mine-1", True)


# All that a server writes


def engine_of(served: ServeProcess) -> psutil.Process:
    """Before any document has come, and other processes with it."""
    children = psutil.Process(served.process.pid).children()
    (engine,) = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
    return engine


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 4, **fields}


def send_everything(url: str) -> int:
    """Marks wherever a document, a prompt, a name or a key may stand; how many requests."""
    document = next(path for path in sorted(SAMPLES.iterdir()) if path.suffix == ".pdf")
    headers = {"Authorization": f"Bearer {MARK}key", "X-Api-Key": f"{MARK}key", "X-Request-Id": "everything-1"}
    with httpx.Client(base_url=url, headers=headers, timeout=120, params={"key": f"{MARK}query"}) as client:
        files = [
            ("file", (f"{MARK}name.txt", f"The invoice of {MARK} is due in May. It is over 30 euros.".encode())),
            ("file", (f"{MARK}damaged.pdf", b"%PDF-1.7 " + MARK.encode())),
            ("file", (f"{MARK}name.pdf", document.read_bytes())),
        ]
        options = {"max_tokens": "8", "prompt": f"What about {MARK}?"}
        assert client.post("/v1/summarize", files=files, data=options).status_code == 200
        assert "event: result" in client.post("/v1/summarize", files=files, data={**options, "stream": "true"}).text
        assert client.post("/v1/summarize", files=files, data={**options, "pages": MARK}).status_code == 200
        assert client.post("/v1/summarize", files=files, data={MARK: MARK}).status_code == 400
        assert client.post("/v1/chat/completions", json=chat(f"Who is {MARK}?")).status_code == 200
        assert client.post("/v1/chat/completions", json=chat(MARK, seed=MARK)).status_code == 400
        assert client.post("/v1/chat/completions", content=f'{{"{MARK}'.encode()).status_code >= 400
        assert client.post("/v1/completions", json={"prompt": MARK, "model": MARK}).status_code == 404
        assert client.get(f"/{MARK}/there").status_code == 404
        assert client.get(f"/v1/files/{MARK}").status_code == 404
        assert client.post("/v1/files", files=files[:1]).status_code == 200
        sent = client.post("/v1/jobs", data={**options, "task": "summarize"}, files=files[:2])
        assert sent.status_code == 202, sent.text
        job = f"/v1/jobs/{sent.json()['id']}"
        wait_until(lambda: client.get(job).json()["status"] not in ("queued", "running"), seconds=60)
        with client.stream("POST", "/v1/chat/completions", json=chat(MARK, stream=True, max_tokens=400)) as stream:
            next(stream.iter_lines())
    return 13


def test_nothing_that_was_sent_is_in_what_a_server_writes(tmp_path: Path) -> None:
    model = save_vision_model(tmp_path)
    with serving_process(model, "--port", "0", "-v", "--log-format", "json", "--ocr", "off") as served:
        url = served.url()
        served.wait_until_ready(url)
        engine = engine_of(served)
        num_requests = send_everything(url)
        os.kill(engine.pid, signal.SIGKILL)
        wait_until(lambda: httpx.get(f"{url}/ready").status_code == 503, seconds=30)
        wait_until(lambda: httpx.get(f"{url}/ready").status_code == 200, seconds=60)
        served.process.send_signal(signal.SIGTERM)
        code, said = served.end()
        said_first = "".join(served.lines.queue)
    assert code == 0
    assert MARK not in said + said_first
    assert "Traceback" not in said
    assert said.count("everything-1") >= num_requests
    assert "it is started again" in said
    lines = [json.loads(line) for line in said.splitlines()]
    (first, *_) = [line for line in lines if line.get("route") == "/v1/summarize"]
    assert first["logger"] == "mmserve.access"
    assert (first["method"], first["status"], first["task"]) == ("POST", 200, "summarize")
    assert (first["num_documents"], first["request_id"]) == (3, "everything-1")
    assert first["num_pages"] >= 2
    assert first["seconds"] > 0
    assert {line["route"] for line in lines if line["level"] == "debug"} >= {"/ready"}


def test_help_names_the_formats() -> None:
    command = [sys.executable, "-c", "from mmserve.cli import main; main()", "serve", "--log-format", "xml"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "json" in ended.stderr
