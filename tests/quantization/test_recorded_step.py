"""Decoding steps of one sequence on a CPU, recorded: the tokens that single calls give, and which steps these are."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import engine_config, greedy, run_to_end
from gguf_models import save_blocks
from reference_models import VOCAB_SIZE, save_reference_model
from reference_qwen_vl import save_qwen_vl
from stored_models import stored

from mmserve.engine.engine import Engine
from mmserve.engine.recorded_step import RecordedStep

PROMPTS = [[(7 * i + 31 * length) % (VOCAB_SIZE - 3) + 3 for i in range(length)] for length in (1, 16, 33)]
# By form: the family, which has biases (qwen2), or norms of heads (qwen3), and whether its output layer is recorded.
FORMS = {
    "Q4_0": ("llama", True),
    "Q4_1": ("qwen2", True),
    "Q8_0": ("qwen3", True),
    "Q6_K": ("qwen2", True),
    "w4a16": ("qwen3", False),
    "awq": ("qwen2", False),
}


@pytest.fixture(scope="module", params=FORMS)
def quantized(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[str, Path]:
    form, folder = request.param, tmp_path_factory.mktemp("recorded")
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}
    full = save_reference_model(FORMS[form][0], folder / "full", tied=False, **sizes)
    is_file = form.startswith("Q")
    return form, save_blocks(full, folder / "model.gguf", form) if is_file else stored(full, folder / "stored", form)


def engine(path: Path, *, is_eager: bool = False, dtype: str = "bfloat16", num_threads: int = 2) -> Engine:
    config = replace(engine_config(path), num_threads=num_threads, enforce_eager=is_eager)
    return Engine(replace(config, dtype=dtype))  # type: ignore[arg-type]


def recorded_step(of_engine: Engine) -> RecordedStep:
    step = of_engine._runner._replayed
    assert isinstance(step, RecordedStep)
    return step


def test_recorded_steps_give_the_same_tokens(quantized: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    form, path = quantized
    ours, eager = engine(path), engine(path, is_eager=True)
    step, num_replays = recorded_step(ours), 0
    assert step._head.is_complete is FORMS[form][1]
    assert eager._runner._replayed is None
    replay = step._layers.replay

    def counted(num_threads: int) -> None:
        nonlocal num_replays
        num_replays += 1
        replay(num_threads)

    monkeypatch.setattr(step._layers, "replay", counted)
    for prompt in PROMPTS:
        assert run_to_end(ours, [prompt], greedy(40)) == run_to_end(eager, [prompt], greedy(40))
    assert num_replays >= 39 * len(PROMPTS)


def test_steps_of_several_sequences_are_not_recorded(
    quantized: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, eager = engine(quantized[1]), engine(quantized[1], is_eager=True)
    expected = run_to_end(eager, PROMPTS, greedy(8))
    monkeypatch.setattr(recorded_step(ours)._layers, "replay", lambda _: pytest.fail("replayed"))
    assert run_to_end(ours, PROMPTS, greedy(8)) == expected


def test_sequences_come_and_go(quantized: tuple[str, Path]) -> None:
    """So steps of one and of several take turns, over blocks that others have used."""
    ours, eager = engine(quantized[1]), engine(quantized[1], is_eager=True)
    for prompts in ([PROMPTS[2]], PROMPTS, [PROMPTS[0]], [PROMPTS[2]]):
        assert run_to_end(ours, prompts, greedy(20)) == run_to_end(eager, prompts, greedy(20))


def test_another_number_of_threads_is_not_recorded(
    quantized: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = engine(quantized[1], num_threads=2)
    expected, before = run_to_end(ours, PROMPTS[1:2], greedy(8)), torch.get_num_threads()
    monkeypatch.setattr(recorded_step(ours)._layers, "replay", lambda _: pytest.fail("replayed"))
    torch.set_num_threads(1)
    try:
        assert run_to_end(ours, PROMPTS[1:2], greedy(8)) == expected
    finally:
        torch.set_num_threads(before)


def test_tokens_that_are_sampled_meanwhile(quantized: tuple[str, Path]) -> None:
    """With asynchronous scheduling the host does not know them when a step is made."""
    config = replace(engine_config(quantized[1]), dtype="bfloat16", num_threads=2)
    expected = run_to_end(engine(quantized[1], is_eager=True), PROMPTS[:1], greedy(12))
    ahead = Engine(replace(config, async_scheduling=True))
    assert run_to_end(ahead, PROMPTS[:1], greedy(12)) == expected


def test_models_that_pytorch_computes_are_not_recorded(tmp_path: Path) -> None:
    full = save_reference_model("qwen2", tmp_path / "full", hidden_size=256, intermediate_size=256)
    assert engine(full)._runner._replayed is None
    assert engine(save_blocks(full, tmp_path / "model.gguf", "Q4_0"), dtype="float32")._runner._replayed is None


def test_positions_of_three_axes(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    text = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "rope_parameters": rope}
    full = save_qwen_vl("qwen2_vl", tmp_path / "full", text=text, vision={"hidden_size": 128})
    path = stored(full, tmp_path / "stored", "w4a16")
    ours, eager = engine(path), engine(path, is_eager=True)
    recorded_step(ours)
    assert run_to_end(ours, PROMPTS[2:], greedy(40)) == run_to_end(eager, PROMPTS[2:], greedy(40))
