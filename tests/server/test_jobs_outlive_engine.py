"""A job whose engine is killed in the middle of it goes on with the next one."""

import os
import signal
from pathlib import Path

import httpx
from live_server import serving, wait_until
from vision_checkpoint import save_vision_model

from mmserve.config import CacheConfig, EngineConfig
from mmserve.engine.client import EngineClient
from mmserve.engine.transport import ProcessTransport
from mmserve.vision.page_types import PageOptions
from mmserve.vision.pages import PageReader


def test_a_job_goes_on_when_its_engine_was_killed(tmp_path: Path) -> None:
    model, cache = save_vision_model(tmp_path), CacheConfig(memory_bytes=8 * 1024**2)
    engine = EngineClient.start(EngineConfig(model=str(model), num_threads=1, use_process=True, cache=cache))
    reader = PageReader(options=PageOptions(ocr="off"), num_workers=1)
    texts = [f"The invoice {number} of May is due in June. It is over {number}0 euros." for number in (3, 4)]
    try:
        engine.wait_until_ready()
        with serving(engine, reader=reader) as server:
            files = [("file", (f"{i}.txt", text.encode(), "text/plain")) for i, text in enumerate(texts)]
            data = {"task": "summarize", "max_tokens": "400", "mode": "text"}
            sent = httpx.post(f"{server.url}/v1/jobs", data=data, files=files)
            assert sent.status_code == 202, sent.text
            job = f"{server.url}/v1/jobs/{sent.json()['id']}"
            wait_until(lambda: engine.stats.num_requests_running > 0, seconds=30)
            assert isinstance(engine.transport, ProcessTransport)
            assert engine.transport.pid is not None
            os.kill(engine.transport.pid, signal.SIGKILL)
            wait_until(lambda: engine.num_restarts == 1)
            assert httpx.get(job).json()["status"] == "running"
            wait_until(lambda: httpx.get(job).json()["status"] not in ("queued", "running"), seconds=120)
            ended = httpx.get(job).json()
    finally:
        engine.close()
        reader.close()
    assert ended["status"] == "done", ended
    assert [result["name"] for result in ended["results"]] == ["0.txt", "1.txt"]
    assert all(result["usage"]["prompt_tokens"] > 0 for result in ended["results"])
