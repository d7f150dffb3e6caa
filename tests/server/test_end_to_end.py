"""The server on the real engine: a tiny random model in a thread, and in a process of its own."""

import asyncio
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from live_server import LiveServer, serving, wait_until
from reference_models import save_reference_model

from mmserve.config import CacheConfig, EngineConfig
from mmserve.engine.client import EngineClient
from mmserve.engine.transport import ProcessTransport
from mmserve.request import SamplingParams

HELLO: Any = [{"role": "user", "content": "The invoice is due"}]
LONG_ANSWER = {"max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reference_model("llama", tmp_path_factory.mktemp("tiny"))


def start_engine(model: Path, *, use_process: bool, **settings: Any) -> EngineClient:
    config = EngineConfig(
        model=str(model),
        served_model_name=("tiny",),
        num_threads=1,
        use_process=use_process,
        cache=CacheConfig(memory_bytes=8 * 1024**2),
        **settings,
    )
    return EngineClient.start(config)


@pytest.fixture(scope="module", params=[False, True], ids=["thread", "process"])
def engine(request: pytest.FixtureRequest, model: Path) -> Iterator[EngineClient]:
    client = start_engine(model, use_process=request.param)
    yield client
    client.close()


@pytest.fixture(scope="module")
def server(engine: EngineClient) -> Iterator[LiveServer]:
    with serving(engine) as live:
        wait_until(lambda: httpx.get(f"{live.url}/ready").status_code == 200, seconds=60)
        yield live


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def text_of(engine: EngineClient, max_tokens: int) -> str:
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    return asyncio.run(engine.complete(engine.tokenizer.encode_chat(HELLO), params))[0].text


def test_answers_are_the_engines_own_streamed_or_not(client: openai.OpenAI, engine: EngineClient) -> None:
    expected = text_of(engine, 24)
    whole = client.chat.completions.create(model="tiny", messages=HELLO, temperature=0, max_tokens=24)
    assert whole.choices[0].message.content == expected
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(engine.tokenizer.encode_chat(HELLO))
    streamed = client.chat.completions.create(model="tiny", messages=HELLO, temperature=0, max_tokens=24, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == expected


def test_many_at_once_answer_as_one_alone(server: LiveServer, engine: EngineClient) -> None:
    body = {"prompt": "Page after page", "temperature": 0, "max_tokens": 16}

    def ask(_: int) -> str:
        text: str = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
        return text

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(ask, range(16)))) == 1


def test_seeds_and_logprobs_work_through_the_whole_stack(client: openai.OpenAI) -> None:
    def sample(seed: int) -> Any:
        return client.chat.completions.create(
            model="tiny", messages=HELLO, seed=seed, max_tokens=12, logprobs=True, top_logprobs=2, n=2
        )

    first, again, other = sample(1), sample(1), sample(2)
    assert [c.message.content for c in first.choices] == [c.message.content for c in again.choices]
    assert first.choices[0].message.content != other.choices[0].message.content
    logprobs = first.choices[0].logprobs
    assert len(logprobs.content) == first.usage.completion_tokens // 2
    assert all(token.logprob <= 0 and len(token.top_logprobs) == 2 for token in logprobs.content)
    assert (
        b"".join(bytes(token.bytes) for token in logprobs.content)
        .decode(errors="replace")
        .startswith(first.choices[0].message.content[:3])
    )


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"prompt": [1] * 600}, "context_length_exceeded"),
        ({"prompt": [1] * 500, "max_tokens": 100}, "context_length_exceeded"),
        ({"prompt": [999_999]}, "invalid_request"),
        ({"prompt": [-1]}, "invalid_request"),
        ({"prompt": "a", "logit_bias": {"999999": 1}}, "invalid_request"),
        ({"prompt": "a", "logit_bias": {"-1": 1}}, "invalid_request"),
        ({"prompt": "a", "stop_token_ids": [999_999]}, "invalid_request"),
        ({"prompt": "a", "stop_token_ids": [2**70]}, "invalid_request"),
        ({"prompt": "a", "max_tokens": 2**70}, "context_length_exceeded"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_cannot_do_is_refused_and_hurts_nobody(
    server: LiveServer, body: dict[str, Any], code: str, stream: bool
) -> None:
    refused = httpx.post(f"{server.url}/v1/completions", json={**body, "stream": stream})
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["code"] == code
    assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}).status_code == 200


def test_a_client_that_leaves_frees_its_blocks(server: LiveServer, engine: EngineClient) -> None:
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json={"prompt": "a", "stream": True, **LONG_ANSWER}
    ) as response:
        next(response.iter_lines())
    wait_until(lambda: engine.stats.num_requests_running == 0 and engine.stats.kv_cache_usage_ratio == 0)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", **LONG_ANSWER, "n": 8}, timeout=0.1)
    wait_until(lambda: engine.stats.num_requests_running == 0 and engine.stats.kv_cache_usage_ratio == 0)
    assert 'finished_reason="abort"' in httpx.get(f"{server.url}/metrics").text


def test_metrics_count_what_was_done(server: LiveServer) -> None:
    def value(name: str) -> float:
        lines = httpx.get(f"{server.url}/metrics").text.splitlines()
        return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    before = value("mmserve_generation_tokens_total")
    body = {"prompt": list(range(10, 74)), "max_tokens": 8, "ignore_eos": True}
    for _ in range(2):
        assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200
    assert value("mmserve_generation_tokens_total") == before + 16
    assert value("mmserve_prefix_cache_hits_total") > 0
    assert value("mmserve_time_to_first_token_seconds_count") > 0
    assert value('mmserve_request_success_total{finished_reason="length"}') >= 2


def pid_of(engine: EngineClient) -> int:
    assert isinstance(engine.transport, ProcessTransport)
    assert engine.transport.pid is not None
    return engine.transport.pid


def test_a_killed_engine_process_fails_its_requests_at_once_and_comes_back(model: Path) -> None:
    engine = start_engine(model, use_process=True)
    try:
        with serving(engine) as server, ThreadPoolExecutor() as pool:
            wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 200, seconds=60)
            url = f"{server.url}/v1/completions"
            body = {"prompt": "a", **LONG_ANSWER, "n": 16}
            whole = pool.submit(httpx.post, url, json=body, timeout=30)
            streamed = pool.submit(httpx.post, url, json={**body, "stream": True}, timeout=30)
            wait_until(lambda: engine.stats.num_requests_running == 32)
            os.kill(pid_of(engine), signal.SIGKILL)
            assert whole.result().status_code == 503
            assert whole.result().json()["error"]["code"] == "engine_dead"
            assert '"code":"engine_dead"' in streamed.result().text
            early = httpx.post(url, json={"prompt": "a"})
            assert (early.status_code, early.json()["error"]["code"]) == (503, "engine_not_ready")
            assert int(early.headers["retry-after"]) > 0
            assert httpx.get(f"{server.url}/health").status_code == 200
            between = httpx.get(f"{server.url}/ready")
            assert (between.status_code, "started again" in between.text) == (503, True)
            wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 200, seconds=60)
            assert httpx.post(url, json={"prompt": "a"}, timeout=30).status_code == 200
            assert "mmserve_engine_restarts_total 1.0" in httpx.get(f"{server.url}/metrics").text
    finally:
        engine.close()


def test_an_engine_that_stays_dead_is_said_by_health(model: Path) -> None:
    engine = start_engine(model, use_process=True, max_engine_restarts=0)
    try:
        with serving(engine) as server:
            wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 200, seconds=60)
            os.kill(pid_of(engine), signal.SIGKILL)
            wait_until(lambda: httpx.get(f"{server.url}/health").status_code == 503)
            assert httpx.get(f"{server.url}/ready").status_code == 503
            refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"})
            assert refused.json()["error"]["code"] == "engine_dead"
    finally:
        engine.close()
