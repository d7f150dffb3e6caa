"""Steps that run out of memory or miss a picture: their requests fail, and the engine goes on."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import check_invariants, engine_config, greedy, run_to_end
from reference_models import save_reference_model
from vision_checkpoint import save_vision_model

from mmserve.engine.client import EngineClient
from mmserve.engine.engine import Engine
from mmserve.engine.messages import EngineRequest, TokenOutput
from mmserve.engine.model_runner import ModelRunner, PendingStep
from mmserve.engine.scheduler import ScheduledBatch
from mmserve.errors import SetupError
from mmserve.request import ImageSpan, PatchesRef
from mmserve.vision.process_memory import is_out_of_memory

NO_MEMORY = RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory\nFrame #0")
SHORT, LONG = [11, 52, 93], list(range(20, 120))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reference_model("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=1)


def outputs_of(engine: Engine, *prompts: list[int], max_tokens: int = 6) -> dict[str, list[TokenOutput]]:
    """By request, named by position."""
    found: dict[str, list[TokenOutput]] = {}
    for i, prompt in enumerate(prompts):
        assert engine.add_request(EngineRequest(str(i), prompt, greedy(max_tokens))) is None
    while engine.has_work:
        for output in engine.step().outputs:
            found.setdefault(output.request_id, []).append(output)
        check_invariants(engine.scheduler)
    return found


@pytest.mark.parametrize("is_ahead", [False, True], ids=["in turn", "a step ahead"])
@pytest.mark.parametrize(
    "error", [NO_MEMORY, MemoryError(), torch.OutOfMemoryError("Tried to allocate 2 GiB")], ids=repr
)
def test_the_requests_of_a_batch_without_memory_fail_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_ahead: bool, error: Exception
) -> None:
    config = replace(engine_config(folder, max_num_seqs=1), async_scheduling=is_ahead)
    engine = Engine(config)
    (expected,) = run_to_end(engine, [SHORT], greedy(6))
    launch = ModelRunner._launch

    def without_memory_for_many(runner: ModelRunner, batch: ScheduledBatch) -> PendingStep:
        if batch.num_tokens > 50:
            raise error
        return launch(runner, batch)

    monkeypatch.setattr(ModelRunner, "_launch", without_memory_for_many)
    with caplog.at_level(logging.ERROR):
        found = outputs_of(engine, SHORT, LONG, SHORT)
    for name in ("0", "2"):
        assert [token_id for output in found[name] for token_id in output.token_ids] == expected
    (lost,) = found["1"]
    assert lost.failure is not None
    assert (lost.finish_reason, lost.failure.code) == ("error", "insufficient_memory")
    assert "--max-num-batched-tokens" in lost.failure.message
    assert "1 requests failed: a step of 100 tokens ran out of memory" in caplog.text
    assert engine.scheduler.pool.num_referenced == 0


def test_a_whole_batch_fails_in_mid_answer_and_its_prefix_can_be_asked_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(engine_config(folder))
    expected = run_to_end(engine, [SHORT, LONG], greedy(8))
    launch, num_steps = ModelRunner._launch, 0

    def without_memory_at_the_fourth(runner: ModelRunner, batch: ScheduledBatch) -> PendingStep:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 4:
            raise NO_MEMORY
        return launch(runner, batch)

    monkeypatch.setattr(ModelRunner, "_launch", without_memory_at_the_fourth)
    found = outputs_of(engine, SHORT, LONG, max_tokens=8)
    for name, tokens in zip(("0", "1"), expected, strict=True):
        *before, last = found[name]
        assert [token_id for output in before for token_id in output.token_ids] == tokens[:3]
        assert last.failure is not None
    assert run_to_end(engine, [SHORT, LONG], greedy(8)) == expected


def test_pixels_that_are_gone_fail_their_request(tmp_path: Path) -> None:
    engine = Engine(engine_config(save_vision_model(tmp_path)))
    (expected,) = run_to_end(engine, [SHORT], greedy(6))
    gone = ImageSpan(1, 4, b"0" * 16, (4, 4), PatchesRef("psm_not_there", (16, 8), "float32", (1, 4, 4)))
    assert engine.add_request(EngineRequest("a", [5] * 9, greedy(6), images=(gone,))) is None
    (output,) = engine.step().outputs
    assert output.failure is not None
    assert output.failure.code == "internal_error"
    assert "/dev/shm" in output.failure.message
    check_invariants(engine.scheduler)
    assert not engine.has_work
    assert engine.scheduler.images.cache.num_tokens == 0
    assert run_to_end(engine, [SHORT], greedy(6)) == [expected]


def test_other_errors_are_not_taken_for_a_lack_of_memory() -> None:
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    assert not is_out_of_memory(ValueError("alloc"))


def test_an_engine_without_memory_to_load_says_so_in_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load(*_: Any) -> None:
        raise NO_MEMORY

    monkeypatch.setattr(ModelRunner, "__init__", load)
    client = EngineClient.start(engine_config(folder))
    try:
        with pytest.raises(SetupError, match=r"ran out of memory: .*can't allocate memory$") as caught:
            client.wait_until_ready(60)
        assert caught.value.code == "insufficient_memory"
    finally:
        client.close()
    assert "Traceback" not in caplog.text
