"""Every form of weights in every precision, with and without a copy, over both caches: what its numbers stand for."""

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from engine_driver import engine_config, greedy, prompt_logits, run_to_end
from gguf_models import KINDS, save_blocks, unpacked
from random_weights import Gains, randomize
from reference_models import VOCAB_SIZE, load_reference_model, save_reference_model
from safetensors.torch import load_file, save_file
from stored_models import FORMS, stored

from mmserve.config import DTypeName
from mmserve.engine.engine import Engine
from mmserve.quantization.gpu_int4 import MAX_PACKED_ROWS

RANDOM = random.Random(0)
PROMPTS = [[RANDOM.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (3, 9, 20)]
PROMPT = [RANDOM.randrange(3, VOCAB_SIZE) for _ in range(24)]
NUM_TOKENS = 16


@dataclass(frozen=True)
class Stored:
    """A quantized checkpoint, and one in full precision of the matrices that it stands for."""

    form: str
    quantized: Path
    unpacked: Path

    @property
    def is_grouped(self) -> bool:
        return self.form in KINDS or self.form.startswith(("awq", "gptq", "w4a16"))


class Place(NamedTuple):
    device: str
    dtype: DTypeName


PLACES = [
    Place("cpu", "float32"),
    Place("cpu", "float16"),
    Place("cpu", "bfloat16"),
    pytest.param(Place("cuda", "bfloat16"), marks=pytest.mark.gpu),
]


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of weights that let rounding grow no more than in a trained model."""
    folder = save_reference_model(
        "qwen2", tmp_path_factory.mktemp("full"), hidden_size=256, intermediate_size=256, num_hidden_layers=2
    )
    model = load_reference_model(folder)
    randomize(model, Gains(scores=1.0, vision_scores=1.0), 0)
    model.save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="module", params=[*FORMS, *KINDS])
def checkpoint(full: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Stored:
    form, folder = request.param, tmp_path_factory.mktemp("stored")
    if form in KINDS:
        return Stored(form, save_blocks(full, folder / "model.gguf", form), unpacked(full, folder / "unpacked", form))
    quantized = stored(full, folder / "quantized", form)
    return Stored(form, quantized, stored(full, folder / "unpacked", form, unpacked=True))


def engine(folder: Path, place: Place, *, dense_copy: str = "auto", kv: str = "auto") -> Engine:
    config: Any = replace(engine_config(folder), device=place.device, dtype=place.dtype, enforce_eager=True)
    return Engine(replace(config, dense_copy=dense_copy, cache=replace(config.cache, dtype=kv)))


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    assert bool(out.isfinite().all())
    return float((out.float() - expected.float()).norm() / expected.float().norm())


# Of logits, over a cache in the precision of computation and over one in FP8, which rounds a small difference up.
ERRORS = {"float32": (1e-4, 1e-3), "float16": (3e-3, 2e-2), "bfloat16": (3e-2, 7e-2)}
# Where inputs are rounded, too.
ERRORS_OF_INPUTS = {"int8 w8a8": 5e-2, "fp8 w8a8": 0.12, "fp8": 0.12, "fp8 static": 0.12}


def _errors_of_inputs(form: str, place: Place) -> float | None:
    """A GPU rounds the inputs of blocks in FP8, too."""
    return ERRORS_OF_INPUTS.get("fp8" if form.endswith("fp8 blocks") and place.device == "cuda" else form)


# By how many standard deviations of the logits two tokens may differ and still be taken one for the other.
NEAR_TIES = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 5e-2}


@pytest.mark.parametrize("kv", ["auto", "fp8"])
@pytest.mark.parametrize("place", PLACES)
def test_logits_are_those_of_the_stored_numbers(checkpoint: Stored, place: Place, kv: str) -> None:
    """A few rows at a time are multiplied packed where that is possible, more of them unpacked."""
    allowed = _errors_of_inputs(checkpoint.form, place) or ERRORS[place.dtype][kv == "fp8"]
    reference = engine(checkpoint.unpacked, place, kv=kv)
    prompt, many = (PROMPT, 16) if place.device == "cpu" else (6 * PROMPT, MAX_PACKED_ROWS + 1)
    expected = {num_rows: prompt_logits(reference, prompt, num_rows) for num_rows in (3, many)}
    for dense_copy in ("keep", "never"):
        started = engine(checkpoint.quantized, place, dense_copy=dense_copy, kv=kv)
        for num_rows, logits in expected.items():
            assert relative_error(prompt_logits(started, prompt, num_rows), logits) < allowed


@pytest.mark.parametrize("place", PLACES)
def test_greedy_tokens_are_those_of_the_stored_numbers(checkpoint: Stored, place: Place) -> None:
    """All of them in float32 and float16, in which weights in groups are unpacked; in others, up to a near tie."""
    reference = engine(checkpoint.unpacked, place)
    expected = run_to_end(reference, PROMPTS, greedy(NUM_TOKENS))
    assert len({token for tokens in expected for token in tokens}) > 12
    for dense_copy in ("keep", "never"):
        tokens = run_to_end(engine(checkpoint.quantized, place, dense_copy=dense_copy), PROMPTS, greedy(NUM_TOKENS))
        if place.dtype != "bfloat16" and checkpoint.is_grouped:
            assert tokens == expected
            continue
        num_same = [_num_same(ours, theirs) for ours, theirs in zip(tokens, expected, strict=True)]
        assert sum(num_same) >= len(PROMPTS) * NUM_TOKENS // 5
        for prompt, ours, theirs, n in zip(PROMPTS, tokens, expected, num_same, strict=True):
            if n < NUM_TOKENS:
                logits = prompt_logits(reference, prompt + theirs[:n])[-1].float()
                missed = float((logits[theirs[n]] - logits[ours[n]]) / logits.std())
                assert missed < (0.3 if _errors_of_inputs(checkpoint.form, place) else NEAR_TIES[place.dtype])


def _num_same(ours: list[int], theirs: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))


@pytest.mark.parametrize("form", ["awq", "gptq", "w4a16", "w8a16", "int8 w8a8", "fp8"])
def test_scales_of_neighbours_are_noticed(form: str, full: Path, tmp_path: Path) -> None:
    """The comparison itself works: rows that have the scales of the row before them are over the limits."""
    right, wrong = stored(full, tmp_path / "right", form), stored(full, tmp_path / "wrong", form)
    tensors = load_file(wrong / "model.safetensors")
    for name, tensor in tensors.items():
        if "scale" in name:
            tensors[name] = tensor.roll(1, dims=-1 if form in ("awq", "gptq") else 0).contiguous()
    save_file(tensors, wrong / "model.safetensors", metadata={"format": "pt"})
    logits = [prompt_logits(engine(folder, Place("cpu", "float32")), PROMPT) for folder in (right, wrong)]
    limit = ERRORS_OF_INPUTS.get(form, ERRORS["bfloat16"][0])
    assert relative_error(logits[1], logits[0]) > 1.5 * limit
