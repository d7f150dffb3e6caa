"""Greedy tokens equal transformers' for every family, however the work is cut, batched, preempted or cached."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import engine_config, greedy, run_to_end
from reference_models import FAMILIES, VOCAB_SIZE, load_reference_model, save_reference_model

from mmserve.engine.client import EngineClient
from mmserve.engine.engine import Engine
from mmserve.engine.model_runner import PendingStep
from mmserve.engine.scheduler import ScheduledBatch

NUM_TOKENS = 24
VARIANTS = [
    *((family, False, "5GB") for family in FAMILIES if family != "smollm2"),
    ("smollm2", True, "5GB"),
    ("qwen2", True, "5GB"),
    ("llama", False, "60KB"),
]
RANDOM = random.Random(0)
PROMPTS = [[RANDOM.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (5, 16, 33, 70)]


class Reference:
    """A checkpoint and transformers' greedy tokens for `PROMPTS`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = load_reference_model(folder)
        self.answers = [reference_tokens(self.model, prompt) for prompt in PROMPTS]


@torch.inference_mode()
def reference_tokens(model: Any, prompt: list[int], stretch: int = 1) -> list[int]:
    """Token by token over the whole text, at positions `stretch` apart."""
    tokens = list(prompt)
    for _ in range(NUM_TOKENS):
        positions = torch.arange(len(tokens))[None] * stretch
        logits = model(torch.tensor([tokens]), position_ids=positions, use_cache=False).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda v: f"{v[0]}-{'tied' if v[1] else 'untied'}-{v[2]}")
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    family, tied, shard = request.param
    folder = save_reference_model(family, tmp_path_factory.mktemp(family), tied=tied, max_shard_size=shard)
    if shard != "5GB":
        assert len(list(folder.glob("*.safetensors"))) > 1
    return Reference(folder)


def test_checkpoint_can_show_a_fault(reference: Reference) -> None:
    """A wrong position, or a layer left out, changes the tokens of the reference itself."""
    prompt, answer = PROMPTS[2], reference.answers[2]
    assert len(set(answer)) >= 5
    assert reference_tokens(reference.model, prompt, stretch=2) != answer
    layers = reference.model.model.layers
    reference.model.model.layers = layers[:1] + layers[2:]
    try:
        assert reference_tokens(reference.model, prompt) != answer
    finally:
        reference.model.model.layers = layers


def test_alone(reference: Reference) -> None:
    engine = Engine(engine_config(reference.folder, prefix_caching=False))
    for prompt, answer in zip(PROMPTS, reference.answers, strict=True):
        assert run_to_end(engine, [prompt], greedy(NUM_TOKENS)) == [answer]


def test_in_a_batch(reference: Reference) -> None:
    engine = Engine(engine_config(reference.folder))
    assert run_to_end(engine, PROMPTS, greedy(NUM_TOKENS)) == reference.answers


def test_chunked_at_16(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(engine_config(reference.folder, max_num_batched_tokens=16))
    largest: list[int] = []
    run = engine._runner.run

    def counting(batch: ScheduledBatch) -> PendingStep:
        largest.append(batch.num_tokens)
        return run(batch)

    monkeypatch.setattr(engine._runner, "run", counting)
    assert run_to_end(engine, PROMPTS, greedy(NUM_TOKENS)) == reference.answers
    assert max(largest) == 16


def test_after_preemption(reference: Reference) -> None:
    engine = Engine(engine_config(reference.folder, num_blocks=25, block_size=8, prefix_caching=False))
    assert run_to_end(engine, PROMPTS, greedy(NUM_TOKENS)) == reference.answers
    assert engine.scheduler.num_preemptions > 0


def test_from_the_prefix_cache(reference: Reference) -> None:
    engine = Engine(engine_config(reference.folder))
    run_to_end(engine, PROMPTS, greedy(NUM_TOKENS))
    assert run_to_end(engine, PROMPTS, greedy(NUM_TOKENS)) == reference.answers
    assert engine.scheduler.stats().prefix_cache_hits == 32 + 64
    continued = [prompt + answer for prompt, answer in zip(PROMPTS, reference.answers, strict=True)]
    assert [t[0] for t in run_to_end(engine, continued, greedy(1))] == [
        reference_tokens(reference.model, prompt)[0] for prompt in continued
    ]


@pytest.mark.parametrize("num_blocks", [25, 256])
def test_while_the_step_before_is_under_way(reference: Reference, num_blocks: int) -> None:
    config = engine_config(reference.folder, num_blocks=num_blocks, block_size=8, max_num_batched_tokens=40)
    engine = Engine(replace(config, async_scheduling=True))
    for _ in range(2):
        assert run_to_end(engine, PROMPTS, greedy(NUM_TOKENS)) == reference.answers
    assert (engine.scheduler.num_preemptions > 0) == (num_blocks == 25)
    penalised = [greedy(NUM_TOKENS, **fields) for fields in ({"presence_penalty": 2.0}, {"min_tokens": 4})]
    for params in penalised:
        expected = run_to_end(Engine(config), PROMPTS, params)
        assert run_to_end(engine, PROMPTS, params) == expected


@pytest.mark.parametrize("use_process", [False, True], ids=["thread", "process"])
def test_through_the_client(tmp_path: Path, use_process: bool) -> None:
    reference = Reference(save_reference_model("qwen3", tmp_path))
    client = EngineClient.start(replace(engine_config(reference.folder), use_process=use_process))
    try:
        client.wait_until_ready(120)
        assert asyncio.run(_answers(client)) == reference.answers
    finally:
        client.close()


async def _answers(client: EngineClient) -> list[list[int]]:
    wanted = [client.complete(prompt, greedy(NUM_TOKENS)) for prompt in PROMPTS]
    return [list(completions[0].token_ids) for completions in await asyncio.gather(*wanted)]


def test_a_wrong_engine_is_caught(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself works: positions off by a block's size in a chunk's middle give other tokens."""
    engine = Engine(engine_config(reference.folder))
    at: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] = engine._runner._rotary.at
    monkeypatch.setattr(engine._runner._rotary, "at", lambda positions: at(positions - positions % 16))
    assert run_to_end(engine, [PROMPTS[2]], greedy(NUM_TOKENS)) != [reference.answers[2]]
