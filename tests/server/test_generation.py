"""Deltas of a request from its streams: one alone in the reader's own task, several side by side."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest
from scripted_engine import ScriptedEngine, failing

from mmserve.errors import EngineError
from mmserve.request import SamplingParams
from mmserve.server.generation import GenerationRequest, generate
from mmserve.server.limits import AdmissionGate
from mmserve.server.owners import LOCAL_OWNER

both = pytest.mark.parametrize("num_prompts", [1, 2], ids=["one prompt", "two prompts"])


def state_of(engine: ScriptedEngine) -> Any:
    gate = AdmissionGate(max_in_flight=9, max_waiting=9, num_waiting=int)
    return SimpleNamespace(engine_for=lambda owner, cache_salt: engine, gate=gate)


def request(num_prompts: int, *, n: int = 1) -> GenerationRequest:
    return GenerationRequest("r", [list(b"Hi")] * num_prompts, SamplingParams(n=n), LOCAL_OWNER)


async def read(engine: ScriptedEngine, asked: GenerationRequest, each: Callable[[int, str], None]) -> None:
    async with aclosing(generate(state_of(engine), asked)) as deltas:
        async for choice, delta in deltas:
            each(choice, delta.text)


@pytest.mark.parametrize(("num_prompts", "n"), [(1, 1), (1, 3), (2, 2)])
def test_every_choice_is_whole_and_in_order(num_prompts: int, n: int) -> None:
    engine, texts = ScriptedEngine(), [""] * (num_prompts * n)

    def add(choice: int, text: str) -> None:
        texts[choice] += text

    asyncio.run(read(engine, request(num_prompts, n=n), add))
    assert texts == ["Hello, world"] * (num_prompts * n)
    assert sorted(engine.finished) == [f"r-{position}" for position in range(num_prompts)]


def test_one_prompt_is_read_without_another_task() -> None:
    counts = set()
    asyncio.run(read(ScriptedEngine(), request(1), lambda *_: counts.add(len(asyncio.all_tasks()))))
    assert counts == {1}


@both
def test_closing_it_aborts_what_runs(num_prompts: int) -> None:
    engine = ScriptedEngine()

    async def read_one() -> None:
        async with aclosing(generate(state_of(engine), request(num_prompts))) as deltas:
            await anext(deltas)
        assert sorted(engine.aborted) == sorted(engine.started), "when it is closed, not when it is collected"

    asyncio.run(read_one())
    assert len(engine.aborted) == num_prompts


@both
def test_a_cancelled_reader_aborts_what_runs(num_prompts: int) -> None:
    engine = ScriptedEngine(seconds_per_token=60.0)

    async def cancel() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(read(engine, request(num_prompts), lambda *_: None), 0.05)
        assert len(engine.aborted) == num_prompts

    asyncio.run(cancel())


@both
def test_an_error_comes_after_what_was_said_before_it(num_prompts: int) -> None:
    engine, said = failing(EngineError("engine_dead", "it died"), after=3), [""] * num_prompts

    def add(choice: int, text: str) -> None:
        said[choice] += text

    with pytest.raises(EngineError, match="it died"):
        asyncio.run(read(engine, request(num_prompts), add))
    assert said[0] == "Hel"
