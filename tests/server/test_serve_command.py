"""`mmserve serve` as a process of its own: what it prints, how it loads, drains and ends."""

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import httpx
import pytest
from live_server import wait_until
from reference_models import save_reference_model

COMMAND = [sys.executable, "-c", "from mmserve.cli import main; main()", "serve"]
LONG = {"prompt": "a", "max_tokens": 300, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reference_model("llama", tmp_path_factory.mktemp("tiny"))


class ServeProcess:
    def __init__(self, model: Path, *arguments: str) -> None:
        command = [*COMMAND, "--model", str(model), "--num-threads", "1", "--kv-cache-memory-bytes", "8MiB", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.lines: queue.Queue[str] = queue.Queue()
        assert self.process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=[self.process.stdout])
        self._reader.start()

    def _read(self, output: IO[str]) -> None:
        for line in output:
            self.lines.put(line)

    def url(self) -> str:
        line = self.lines.get(timeout=60)
        assert line.startswith("Listening on http://127.0.0.1:"), line
        return line.split()[2]

    def wait_until_ready(self, url: str) -> None:
        wait_until(lambda: httpx.get(f"{url}/ready").status_code == 200, seconds=60)

    def end(self) -> tuple[int, str]:
        """The exit code, and what was said on standard error."""
        assert self.process.stderr is not None
        said = self.process.stderr.read()
        return self.process.wait(timeout=60), said

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()


@contextmanager
def serving_process(model: Path, *arguments: str) -> Iterator[ServeProcess]:
    served = ServeProcess(model, *arguments)
    try:
        yield served
    finally:
        served.stop()


def test_it_listens_while_it_loads_and_sigterm_lets_requests_finish(model: Path) -> None:
    with serving_process(model, "--port", "0", "--served-model-name", "tiny") as served, ThreadPoolExecutor() as pool:
        url = served.url()
        assert httpx.get(f"{url}/health").status_code == 200
        early = httpx.post(f"{url}/v1/completions", json=LONG)
        assert early.status_code == 503
        assert early.json()["error"]["code"] == "engine_not_ready"
        assert int(early.headers["retry-after"]) > 0
        served.wait_until_ready(url)
        assert served.lines.get(timeout=10).startswith("Ready after ")
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "tiny"
        answers = [pool.submit(httpx.post, f"{url}/v1/completions", json=LONG, timeout=60) for _ in range(4)]
        wait_until(lambda: "mmserve_num_requests_running 4.0" in httpx.get(f"{url}/metrics").text)
        served.process.send_signal(signal.SIGTERM)
        assert [answer.result().json()["usage"]["completion_tokens"] for answer in answers] == [300] * 4
        code, said = served.end()
    assert (code, said) == (0, "")


@pytest.mark.parametrize(("signal_number", "expected"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_while_it_loads_ends_it(model: Path, signal_number: int, expected: int) -> None:
    with serving_process(model, "--port", "0", "--engine-thread") as served:
        served.url()
        served.process.send_signal(signal_number)
        code, said = served.end()
    assert (code, said) == (expected, "")


def test_a_model_that_cannot_be_loaded_ends_it_with_a_sentence(model: Path, tmp_path: Path) -> None:
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    with serving_process(tmp_path, "--port", "0") as served:
        code, said = served.end()
    assert code == 3
    assert said.startswith("mmserve: ")
    assert "model.embed_tokens.weight" in said
    assert "Traceback" not in said


def test_an_address_in_use_is_said_before_anything_is_loaded(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with serving_process(model, "--port", str(port)) as served:
            code, said = served.end()
    assert code == 2
    assert f"127.0.0.1:{port}" in said
    assert "--port" in said


def test_a_data_folder_that_cannot_be_had_is_said_before_it_serves(model: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with serving_process(model, "--port", "0", "--data-dir", str(tmp_path / "taken")) as served:
        code, said = served.end()
    assert code == 1
    assert said.startswith("mmserve: Files could not be stored")
    assert "Traceback" not in said


def test_help_tells_a_newcomer_what_it_does() -> None:
    environment = {**os.environ, "COLUMNS": "200"}
    shown = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True, env=environment, check=True).stdout
    for text in (
        "/v1/summarize",
        "--port",
        "127.0.0.1",
        "--shutdown-timeout",
        "--kv-cache-memory-bytes",
        "--ocr",
        "--data-dir",
    ):
        assert text in shown
