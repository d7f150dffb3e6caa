"""The embedded model: logits agree with transformers loading the same GGUF file."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mmserve.config import CacheConfig, EngineConfig
from mmserve.engine.engine import Engine
from mmserve.engine.messages import EngineRequest
from mmserve.engine.scheduler import advance
from mmserve.request import SamplingParams, Sequence
from mmserve.weights.checkpoint import open_checkpoint

TEXTS = (
    "The capital of France is",
    "Invoice 2024-117: 3 hours of consulting at 95.00 EUR each come to",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Water boils at 100 degrees Celsius because at that temperature its vapour pressure",
    "Once upon a time there was a small lighthouse on a rock in the sea, and its keeper",
)


def _transformers_logits(path: Path, dtype: torch.dtype) -> list[torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=dtype)
    tokenizer = open_checkpoint(str(path)).tokenizer()
    with torch.inference_mode():
        return [model(torch.tensor([tokenizer.encode(text)])).logits[0].float() for text in TEXTS]


@pytest.fixture(scope="module")
def reference_logits(smollm2_path: Path) -> list[torch.Tensor]:
    return _transformers_logits(smollm2_path, torch.float32)


@pytest.fixture(scope="module")
def bfloat16_error(smollm2_path: Path, reference_logits: list[torch.Tensor]) -> float:
    """What computing in bfloat16 costs transformers itself."""
    return _mean_error(_transformers_logits(smollm2_path, torch.bfloat16), reference_logits)


def _engine(path: Path, dtype: Any) -> Engine:
    return Engine(EngineConfig(model=str(path), dtype=dtype, device="cpu", cache=CacheConfig(memory_bytes=2**28)))


@torch.inference_mode()
def _logits(engine: Engine, token_ids: list[int], *, num_per_step: int) -> torch.Tensor:
    """Logits of every position, computed `num_per_step` tokens a step through the paged cache."""
    runner, rows = engine._runner, []
    block_ids = list(range(-(-len(token_ids) // runner.block_size)))
    sequence = Sequence("logits", token_ids, SamplingParams(), block_ids=block_ids)
    while sequence.num_computed_tokens < len(token_ids):
        count = min(num_per_step, len(token_ids) - sequence.num_computed_tokens)
        inputs = runner._inputs.build([advance(sequence, count)], {})
        rows.append(runner._model.logits(runner._forward(inputs)).float())
    return torch.cat(rows)


def _relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    return float((out - reference).norm() / reference.norm())


def _mean_error(out: list[torch.Tensor], reference: list[torch.Tensor]) -> float:
    return sum(_relative_error(a, b) for a, b in zip(out, reference, strict=True)) / len(out)


@pytest.mark.parametrize("num_per_step", [64, 4, 1])
def test_float32_logits_agree(smollm2_path: Path, reference_logits: list[torch.Tensor], num_per_step: int) -> None:
    engine = _engine(smollm2_path, "float32")
    tokenizer = open_checkpoint(str(smollm2_path)).tokenizer()
    for text, reference in zip(TEXTS, reference_logits, strict=True):
        logits = _logits(engine, tokenizer.encode(text), num_per_step=num_per_step)
        assert _relative_error(logits, reference) < 1e-4
        assert torch.equal(logits.argmax(-1), reference.argmax(-1))


@pytest.mark.parametrize("num_per_step", [64, 4, 1])
def test_bfloat16_logits_agree(
    smollm2_path: Path, reference_logits: list[torch.Tensor], bfloat16_error: float, num_per_step: int
) -> None:
    """Many rows through bf16 products, few through packed products: as close to float32 as bf16 is in transformers."""
    engine = _engine(smollm2_path, "bfloat16")
    tokenizer = open_checkpoint(str(smollm2_path)).tokenizer()
    logits = [_logits(engine, tokenizer.encode(text), num_per_step=num_per_step) for text in TEXTS]
    assert _mean_error(logits, reference_logits) < 1.3 * bfloat16_error
    agreeing = torch.cat([a.argmax(-1) == b.argmax(-1) for a, b in zip(logits, reference_logits, strict=True)])
    assert agreeing.float().mean() > 0.95


def test_answers_a_question(smollm2_path: Path) -> None:
    engine = _engine(smollm2_path, "auto")
    tokenizer = open_checkpoint(str(smollm2_path)).tokenizer()
    prompt = tokenizer.encode_chat(
        [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    )
    engine.add_request(EngineRequest("a", prompt, SamplingParams(temperature=0.0, max_tokens=20)))
    answer: list[int] = []
    while engine.has_work:
        answer += [token for output in engine.step().outputs for token in output.token_ids]
    assert "Paris" in tokenizer.decode(answer)
