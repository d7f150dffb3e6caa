"""The engine's one step, and what it answers to requests that it cannot serve."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_driver import check_invariants, engine_config, greedy, run_to_end
from image_load import sequence_of
from reference_models import VOCAB_SIZE, save_reference_model

from mmserve.engine.engine import Engine
from mmserve.engine.messages import EngineRequest
from mmserve.errors import SetupError
from mmserve.request import ImageSpan, SamplingParams

NUM_TOKENS = 16
RANDOM = random.Random(1)
STEM = [RANDOM.randrange(3, VOCAB_SIZE) for _ in range(30)]
PROMPTS = [[*STEM[:cut], *(RANDOM.randrange(3, VOCAB_SIZE) for _ in range(7))] for cut in (0, 8, 17, 24, 30)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reference_model("qwen3", tmp_path_factory.mktemp("qwen3"), num_hidden_layers=2)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    engine = Engine(engine_config(folder, prefix_caching=False))
    return [run_to_end(engine, [prompt], greedy(NUM_TOKENS))[0] for prompt in PROMPTS]


@pytest.mark.parametrize("num_blocks", [7, 8, 11, 19])
@pytest.mark.parametrize("max_num_batched_tokens", [5, 2048])
def test_a_prefix_cache_that_must_evict_changes_no_token(
    folder: Path, expected: list[list[int]], num_blocks: int, max_num_batched_tokens: int
) -> None:
    config = engine_config(folder, num_blocks=num_blocks, block_size=8, max_num_batched_tokens=max_num_batched_tokens)
    engine = Engine(config)
    for _ in range(3):
        assert run_to_end(engine, PROMPTS, greedy(NUM_TOKENS)) == expected
    assert engine.scheduler.stats().prefix_cache_hits > 0
    assert engine.scheduler.pool.num_referenced == 0


def test_seeded_sampling_survives_preemption(folder: Path) -> None:
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)

    def answers(num_blocks: int) -> tuple[list[list[int]], int]:
        engine = Engine(engine_config(folder, num_blocks=num_blocks, block_size=8))
        return run_to_end(engine, PROMPTS, params), engine.scheduler.num_preemptions

    (roomy, none), (tight, some) = answers(64), answers(8)
    assert (none, some > 0) == (0, True)
    assert roomy == tight


@pytest.mark.parametrize(
    ("prompt", "params", "code", "param"),
    [
        ([], greedy(1), "invalid_request", "prompt"),
        ([VOCAB_SIZE], greedy(1), "invalid_request", "prompt"),
        ([-1], greedy(1), "invalid_request", "prompt"),
        ([1], greedy(1, stop_token_ids=(-1,)), "invalid_request", "stop_token_ids"),
        ([1], greedy(1, logit_bias={VOCAB_SIZE: 1.0}), "invalid_request", "logit_bias"),
        ([1] * 512, greedy(1), "context_length_exceeded", "prompt"),
        ([1], greedy(512), "context_length_exceeded", "max_tokens"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_refusal_is_an_output(folder: Path, prompt: list[int], params: SamplingParams, code: str, param: str) -> None:
    engine = Engine(engine_config(folder))
    output = engine.add_request(EngineRequest("a", prompt, params))
    assert output is not None
    assert (output.request_id, output.finish_reason) == ("a", "error")
    assert output.failure is not None
    assert (output.failure.code, output.failure.param) == (code, param)
    assert not engine.has_work
    assert run_to_end(engine, [PROMPTS[0]], greedy(1)) != [[]]


def test_a_full_queue_is_an_output_too(folder: Path) -> None:
    engine = Engine(engine_config(folder, max_num_waiting=1))
    assert engine.add_request(EngineRequest("a", [5], greedy(1))) is None
    output = engine.add_request(EngineRequest("b", [5], greedy(1)))
    assert output is not None
    assert output.failure is not None
    assert output.failure.code == "queue_full"


def test_abort_answers_once(folder: Path) -> None:
    engine = Engine(engine_config(folder))
    engine.add_request(EngineRequest("a", PROMPTS[0], greedy(50)))
    engine.step()
    output = engine.abort("a")
    assert output is not None
    assert (output.finish_reason, output.token_ids) == ("abort", ())
    assert engine.abort("a") is None
    assert not engine.has_work
    check_invariants(engine.scheduler)
    assert engine.scheduler.pool.num_referenced == 0


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_step_that_can_run_nothing_is_empty(folder: Path, async_scheduling: bool) -> None:
    """The older request waits for the encoder cache's room that the newer one holds, and that one for its blocks."""
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 19, "max_encoder_tokens": 8, "encoder_cache_tokens": 11}
    config = engine_config(folder, num_blocks=11, block_size=4, prefix_caching=False, **limits)
    engine = Engine(replace(config, async_scheduling=async_scheduling))
    runner, cache = engine._runner, engine.scheduler.images.cache

    def encode(images: Sequence[ImageSpan]) -> Callable[[], float]:
        for image in images:
            cache.put(image.content_hash, torch.zeros(image.length, runner.model_config.hidden_size))
        return lambda: 0.0

    runner.encoder.encode = encode  # type: ignore[method-assign]
    engine.scheduler.add(sequence_of("first", [15, ("c", 7)], max_tokens=5))
    for _ in range(6 + async_scheduling):
        engine.step()
    assert not engine.has_work
    engine.scheduler.add(sequence_of("older", [("a", 8), ("a", 9), 6, ("a", 4)], max_tokens=8))
    engine.scheduler.add(sequence_of("newer", [14, ("a", 9)], max_tokens=6))
    finished: list[str] = []
    while engine.has_work:
        finished += [output.request_id for output in engine.step().outputs if output.finish_reason]
        check_invariants(engine.scheduler)
    assert finished == ["older", "newer"]
    assert engine.scheduler.num_preemptions == 1


def test_what_it_says_when_it_is_ready(folder: Path) -> None:
    message = Engine(engine_config(folder, num_blocks=9)).ready_message
    assert (message.max_model_len, message.num_blocks) == (144, 9)
    assert (message.device, message.dtype) == ("cpu", "float32")


def test_an_architecture_that_is_not_served_is_named(folder: Path, tmp_path: Path) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("Qwen3ForCausalLM", "OtherForCausalLM"))
    with pytest.raises(SetupError, match="OtherForCausalLM") as caught:
        Engine(engine_config(tmp_path))
    assert caught.value.code == "model_unavailable"
    assert "LlamaForCausalLM" in str(caught.value)
