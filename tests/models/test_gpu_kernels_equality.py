"""Models on the kernels of a GPU, interpreted on the CPU: the tokens of transformers, with a step always under way."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_driver import engine_config, greedy, run_to_end
from reference_models import load_reference_model, save_reference_model

from mmserve.attention.base import AttentionBackend
from mmserve.attention.triton_backend import TritonAttention
from mmserve.engine.engine import Engine
from mmserve.engine.model_runner import ModelRunner
from mmserve.kernels import fused
from mmserve.kernels.sampling import argmax

NUM_TOKENS = 6
PROMPTS = [[7, 11, 13, 17, 19], [23, 5, 8, 41, 3, 3, 29, 31, 37, 4, 9, 6, 10, 12, 14, 15, 16, 18]]


def triton_attention(runner: ModelRunner) -> AttentionBackend:
    config = runner.model_config
    return TritonAttention(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=runner.block_size,
        device=runner.device,
    )


@pytest.fixture
def kernels_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRunner, "_attention_backend", triton_attention)
    monkeypatch.setattr(ModelRunner, "_best", lambda self, logits: argmax(logits))
    monkeypatch.setattr("mmserve.weights.layer_loader.kernel_set", lambda device: fused)


@torch.inference_mode()
def reference_answer(folder: Path, prompt: list[int]) -> list[int]:
    model = load_reference_model(folder)
    output = model.generate(torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None)
    return output[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


@pytest.mark.usefixtures("kernels_of_a_gpu")
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_greedy_tokens(family: str, tmp_path: Path) -> None:
    folder = save_reference_model(family, tmp_path)
    config = replace(engine_config(folder, max_num_batched_tokens=16), async_scheduling=True)
    engine = Engine(config)
    answers = [reference_answer(folder, prompt) for prompt in PROMPTS]
    assert run_to_end(engine, PROMPTS, greedy(NUM_TOKENS)) == answers
