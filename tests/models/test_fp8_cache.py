"""A KV cache in FP8: what it costs in exactness, and that cutting, finding and preempting change nothing more."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import engine_config, greedy, prompt_logits, run_to_end
from reference_models import VOCAB_SIZE, save_reference_model
from safetensors.torch import load_file, save_file

from mmserve.attention import torch_backend
from mmserve.engine.engine import Engine
from mmserve.kernels.cpu import store_kv

RANDOM = random.Random(0)
PROMPTS = [[RANDOM.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (5, 16, 33, 70)]
NUM_TOKENS = 24


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reference_model(request.param, tmp_path_factory.mktemp(request.param))


def engine(folder: Path, **fields: Any) -> Engine:
    config = engine_config(folder, **fields)
    return Engine(replace(config, cache=replace(config.cache, dtype="fp8")))


def layers_of(started: Engine) -> list[Any]:
    model: Any = started._runner._model
    return [layer._attention._layer for layer in model._layers]


def test_twice_the_blocks_in_the_same_memory_at_half_precision(folder: Path) -> None:
    config = replace(engine_config(folder), dtype="bfloat16")
    plain, small = Engine(config), Engine(replace(config, cache=replace(config.cache, dtype="fp8")))
    assert small._runner.kv_cache.num_blocks == 2 * plain._runner.kv_cache.num_blocks
    assert small._runner.kv_cache.layers[0].dtype is torch.float8_e4m3fn


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out - expected).norm() / expected.norm())


def test_logits_are_those_of_rounded_keys_and_values(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounded, full = (
        prompt_logits(engine(folder), PROMPTS[-1]),
        prompt_logits(Engine(engine_config(folder)), PROMPTS[-1]),
    )

    def store_rounded(kv: torch.Tensor, cache: torch.Tensor, rows: torch.Tensor, *_: float) -> None:
        store_kv(kv.to(torch.float8_e4m3fn).float(), cache, rows)

    monkeypatch.setattr(torch_backend, "store_kv", store_rounded)
    twin = Engine(engine_config(folder))
    monkeypatch.setattr(twin._runner._attention, "_rounds_kv", True)
    assert relative_error(rounded, prompt_logits(twin, PROMPTS[-1])) < 1e-4
    assert 1e-3 < relative_error(rounded, full) < 0.2


@pytest.mark.parametrize(
    "fields",
    [{"max_num_batched_tokens": 16}, {"prefix_caching": False}, {"num_blocks": 5}, {"max_num_seqs": 1}],
    ids=["chunks", "no prefix cache", "preemption", "one by one"],
)
def test_the_same_tokens_however_the_work_is_cut(folder: Path, fields: dict[str, Any]) -> None:
    expected = run_to_end(engine(folder), PROMPTS, greedy(NUM_TOKENS))
    if "num_blocks" in fields:
        # Counted in float32: the cache has four times as many.
        fields = {**fields, "num_blocks": 2}
    assert run_to_end(engine(folder, **fields), PROMPTS, greedy(NUM_TOKENS)) == expected


def test_a_prefix_that_is_found_again(folder: Path) -> None:
    started = engine(folder)
    first = run_to_end(started, PROMPTS, greedy(NUM_TOKENS))
    assert run_to_end(started, PROMPTS, greedy(NUM_TOKENS)) == first


def test_scales_come_from_the_checkpoint(tmp_path: Path) -> None:
    folder = save_reference_model("llama", tmp_path / "model")
    file = next(folder.glob("*.safetensors"))
    weights = load_file(file)
    scales = {f"model.layers.{i}.self_attn.{part}_scale": torch.tensor(2.0**-i) for i in range(2) for part in "kv"}
    save_file({**weights, **scales}, file, metadata={"format": "pt"})
    started = engine(folder)
    started._runner.warm_up()
    assert [layer.scales.k for layer in layers_of(started)[:2]] == [1.0, 0.5]
    # Powers of two move the point and round nothing, but for the smallest numbers.
    plain = engine(save_reference_model("llama", tmp_path / "plain"))
    assert relative_error(prompt_logits(started, PROMPTS[-1]), prompt_logits(plain, PROMPTS[-1])) < 0.02


def test_warm_up_finds_values_that_would_be_cut_off(tmp_path: Path) -> None:
    folder = save_reference_model("llama", tmp_path / "model")
    file = next(folder.glob("*.safetensors"))
    weights = load_file(file)
    weights["model.layers.0.self_attn.v_proj.weight"] *= 1e4
    save_file(weights, file, metadata={"format": "pt"})
    started = engine(folder)
    started._runner.warm_up()
    scales = [layer.scales for layer in layers_of(started)]
    assert scales[0].v > 4.0
    assert all(each.k == 1.0 for each in scales)
