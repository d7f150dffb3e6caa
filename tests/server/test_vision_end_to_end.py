"""The samples by upload to a tiny random model that sees: encoder, KV blocks and server-sent events."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import LiveServer, serving
from vision_checkpoint import save_vision_model

from mmserve.commands.options import VisionOptions
from mmserve.config import CacheConfig, EngineConfig
from mmserve.engine.client import EngineClient
from mmserve.vision.page_types import PageLimits
from mmserve.vision.pages import PageOptions, PageReader

SAMPLES = Path(__file__).parents[2] / "samples"
DOCUMENTS = sorted(path for path in SAMPLES.iterdir() if path.suffix in (".pdf", ".png", ".jpg", ".tif", ".tiff"))


@pytest.fixture(scope="module", params=[False, True], ids=["thread", "process"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    config = EngineConfig(
        model=str(save_vision_model(tmp_path_factory.mktemp("vision"))),
        num_threads=1,
        use_process=request.param,
        cache=CacheConfig(memory_bytes=8 * 1024**2),
    )
    engine = EngineClient.start(config)
    reader = PageReader(options=PageOptions(ocr="off"), num_workers=1)
    prompts = VisionOptions(num_preprocess_workers=1).open_prompts(engine, PageLimits())
    try:
        engine.wait_until_ready()
        with serving(engine, reader=reader, prompts=prompts) as live:
            yield live
    finally:
        prompts.close()
        reader.close()
        engine.close()


def events(response: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]


def metric(server: LiveServer, name: str) -> float:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} "))


def test_the_samples_go_through_upload_encoder_and_blocks_to_events(server: LiveServer) -> None:
    assert len(DOCUMENTS) >= 2
    files = [("file", (path.name, path.read_bytes())) for path in DOCUMENTS]
    data = {"mode": "vision", "stream": "true", "max_tokens": "24"}
    response = httpx.post(f"{server.url}/v1/summarize", files=files, data=data, timeout=120)
    assert response.status_code == 200, response.text
    told = events(response)
    results = [event["result"] for event in told if event["type"] == "result"]
    assert {result["name"] for result in results} == {path.name for path in DOCUMENTS}, told
    assert told[-1]["type"] == "done"
    assert all(result["usage"]["prompt_tokens"] > 0 for result in results)
    num_pages = sum(result["num_pages"] for result in results)
    assert metric(server, "mmserve_preprocess_seconds_count") >= num_pages / 2
    assert metric(server, "mmserve_encoder_tokens_total") > 20 * num_pages / 2
    assert metric(server, "mmserve_encoder_cache_queries_total") > 0
    assert metric(server, "mmserve_kv_cache_usage_ratio") == 0


def test_a_page_in_a_chat_is_a_stream_of_events(server: LiveServer) -> None:
    import base64

    document = next(path for path in DOCUMENTS if path.suffix == ".pdf")
    url = "data:application/pdf;base64," + base64.b64encode(document.read_bytes()).decode()
    part = {"type": "file", "file": {"file_data": url, "filename": document.name}}
    question = {"type": "text", "text": "What is due?"}
    body = {
        "messages": [{"role": "user", "content": [part, question]}],
        "stream": True,
        "max_tokens": 8,
        "ignore_eos": True,
    }
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    lines = [line for line in response.text.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2][6:])["choices"][0]["finish_reason"] == "length"
