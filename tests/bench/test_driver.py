"""The driver over a scripted engine: what it offers, when, and what it makes of the answers."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import pytest

from mmserve.bench import driver
from mmserve.bench.driver import WARM_UP_PROMPT, measure_engine, run_workload
from mmserve.bench.workloads import WORKLOADS, Workload, build_workload
from mmserve.config import EngineConfig, ModelConfig
from mmserve.engine.client import CompletionDelta, EngineClient
from mmserve.engine.messages import EngineReady
from mmserve.errors import EngineError
from mmserve.request import SamplingParams
from mmserve.weights.shapes import SHAPES

PROMPTS = ((1, 2, 3), (4, 5), (6,))


class ScriptedClient:
    """Answers with deltas of two tokens; `num_missing` tokens are left out at the end."""

    def __init__(self, *, num_missing: int = 0, failure: EngineError | None = None) -> None:
        self.engine_info = EngineReady(max_model_len=100, num_blocks=10, device="cpu", dtype="float32")
        self.model_config = ModelConfig.from_hf(SHAPES["llama-2-7b"].config)
        self.num_missing = num_missing
        self.failure = failure
        self.calls: list[tuple[tuple[int, ...], SamplingParams]] = []
        self.log: list[str] = []
        self.num_running = 0
        self.most_running = 0

    def wait_until_ready(self) -> None:
        self.log.append("ready")

    def close(self) -> None:
        self.log.append("closed")

    async def generate(self, prompt: Sequence[int], params: SamplingParams) -> AsyncIterator[CompletionDelta]:
        assert params.max_tokens is not None
        self.calls.append((tuple(prompt), params))
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        num_tokens = params.max_tokens - self.num_missing
        for start in range(0, num_tokens, 2):
            await asyncio.sleep(0)
            if self.failure and len(self.calls) > 1:
                raise self.failure
            yield self._delta(prompt, min(2, num_tokens - start), is_last=start + 2 >= num_tokens)
        self.num_running -= 1

    def _delta(self, prompt: Sequence[int], num_tokens: int, *, is_last: bool) -> CompletionDelta:
        return CompletionDelta(
            index=0,
            text="x",
            token_ids=(7,) * num_tokens,
            logprobs=(),
            finish_reason="length" if is_last else None,
            stop_reason=None,
            num_prompt_tokens=len(prompt),
            num_cached_tokens=0,
        )


def run(client: ScriptedClient, workload: Workload) -> Any:
    return asyncio.run(run_workload(cast(EngineClient, client), workload)).records


def test_all_requests_are_offered_at_once_after_a_warm_up() -> None:
    client = ScriptedClient()
    records = run(client, Workload("W", PROMPTS, max_tokens=5))
    assert [prompt for prompt, _ in client.calls] == [WARM_UP_PROMPT, *PROMPTS]
    assert client.most_running == 3
    assert [record.num_prompt_tokens for record in records] == [3, 2, 1]
    assert {record.num_output_tokens for record in records} == {5}
    assert all(record.offered < record.first_token < record.last_token for record in records)


def test_answers_are_greedy_and_of_a_fixed_length() -> None:
    client = ScriptedClient()
    run(client, Workload("W", PROMPTS, max_tokens=5))
    for _, params in client.calls[1:]:
        assert (params.temperature, params.max_tokens, params.ignore_eos) == (0.0, 5, True)
        assert not params.detokenize


def test_concurrency_bounds_what_runs_at_once() -> None:
    client = ScriptedClient()
    records = run(client, Workload("W", PROMPTS, max_tokens=4, concurrency=1))
    assert client.most_running == 1
    assert records[1].offered >= records[0].last_token


def test_one_at_a_time_the_first_of_all_is_as_long_as_the_others() -> None:
    client = ScriptedClient()
    alone = Workload("W", (tuple(range(50)), (5,)), max_tokens=4, concurrency=1)
    first, records = asyncio.run(run_workload(cast(EngineClient, client), alone))
    assert [len(prompt) for prompt, _ in client.calls] == [50, 50, 1]
    assert client.calls[0][0][:32] == WARM_UP_PROMPT
    assert first.num_prompt_tokens == 50
    assert first.last_token <= records[0].offered


def test_a_prefix_is_warmed_before_the_first_request() -> None:
    client = ScriptedClient()
    run(client, Workload("W", PROMPTS, max_tokens=4, warm_prefix=(1, 2)))
    assert [prompt for prompt, _ in client.calls] == [WARM_UP_PROMPT, (1, 2), *PROMPTS]


def test_an_answer_that_is_too_short_spoils_the_round() -> None:
    with pytest.raises(EngineError, match="after 3 of 4 tokens"):
        run(ScriptedClient(num_missing=1), Workload("W", PROMPTS, max_tokens=4))


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_warm_up_begins_no_prompt_of_a_workload(name: str) -> None:
    workload = build_workload(name, 20)
    assert all(prompt[0] != WARM_UP_PROMPT[0] for prompt in (*workload.prompts, workload.warm_prefix) if prompt)


class Starter:
    """Stands in for the class `EngineClient`."""

    def __init__(self, client: ScriptedClient) -> None:
        self.client = client

    def start(self, config: EngineConfig) -> ScriptedClient:
        self.client.log.append(f"started {config.model}")
        return self.client


def test_a_round_starts_an_engine_and_closes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    client = ScriptedClient()
    monkeypatch.setattr(driver, "EngineClient", Starter(client))
    measured = measure_engine(EngineConfig(model="m", num_threads=3), Workload("W", PROMPTS, max_tokens=4))
    assert client.log == ["started m", "ready", "closed"]
    assert len(measured.records) == 3
    assert (measured.device, measured.dtype, measured.threads) == ("cpu", "float32", 3)
    assert measured.peak_memory_bytes > 10**7
    assert measured.start_seconds is not None
    assert 0 <= measured.start_seconds < 5
    assert measured.model == client.model_config
    assert measured.first is None


def test_the_first_request_is_measured_where_it_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "EngineClient", Starter(ScriptedClient()))
    measured = measure_engine(EngineConfig(model="m"), Workload("W", PROMPTS, max_tokens=4, concurrency=1))
    assert measured.first is not None
    assert measured.first.num_prompt_tokens == 3
    assert len(measured.records) == 3


def test_an_engine_that_fails_is_closed_and_its_error_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    client = ScriptedClient(failure=EngineError("engine_dead", "the engine died"))
    monkeypatch.setattr(driver, "EngineClient", Starter(client))
    with pytest.raises(EngineError, match="the engine died"):
        measure_engine(EngineConfig(), Workload("W", PROMPTS, max_tokens=4))
    assert client.log[-1] == "closed"
