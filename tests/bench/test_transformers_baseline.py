"""The baseline process with a tiny random model."""

import dataclasses
import itertools
import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from reference_models import VOCAB_SIZE, save_reference_model

from mmserve.bench.transformers_baseline import BaselineSettings, StaticBatches, TransformersBaseline
from mmserve.bench.workloads import Workload
from mmserve.config import EngineConfig, SchedulerConfig
from mmserve.errors import EngineError, SetupError
from mmserve.weights.shapes import SHAPES

PROMPTS = ((5, 6, 7, 8), (9, 10), (11, 12, 13))


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which every token ends the sequence, so that one that is heeded shows."""
    folder = tmp_path_factory.mktemp("llama")
    return save_reference_model("llama", folder, num_hidden_layers=1, eos_token_id=list(range(VOCAB_SIZE)))


@pytest.fixture(scope="module")
def baseline(model_path: Path) -> Iterator[TransformersBaseline]:
    config = EngineConfig(model=str(model_path), num_threads=1, scheduler=SchedulerConfig(max_num_seqs=2))
    with TransformersBaseline(config) as started:
        yield started


@pytest.fixture(scope="module")
def batches(model_path: Path) -> StaticBatches:
    settings = BaselineSettings(model_path, is_dummy=False, device="cpu", num_threads=None, max_batch=2)
    return StaticBatches(settings)


def test_a_round_in_the_other_process(baseline: TransformersBaseline) -> None:
    measured = baseline.measure(Workload("W", PROMPTS, max_tokens=3))
    assert [record.num_prompt_tokens for record in measured.records] == [4, 2, 3]
    assert {record.num_output_tokens for record in measured.records} == {3}
    assert (measured.device, measured.dtype, measured.threads) == ("cpu", "bfloat16", 1)
    assert measured.peak_memory_bytes > 10**7
    assert baseline.pid in {child.pid for child in psutil.Process().children()}


def test_a_shape_needs_no_file() -> None:
    config = {
        **SHAPES["llama-2-7b"].config,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "vocab_size": 300,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    settings = BaselineSettings(None, is_dummy=True, device="cpu", num_threads=None, max_batch=2, config=config)
    records = StaticBatches(settings).measure(Workload("W", PROMPTS, max_tokens=3)).records
    assert [record.num_output_tokens for record in records] == [3, 3, 3]


def test_batches_run_one_after_the_other_and_all_are_offered_at_the_start(batches: StaticBatches) -> None:
    first, second, third = batches.measure(Workload("W", PROMPTS, max_tokens=3)).records
    assert first.offered == second.offered == third.offered
    assert first.first_token == second.first_token < first.last_token == second.last_token
    assert third.first_token > first.last_token


def test_a_single_stream_offers_each_request_after_the_one_before(batches: StaticBatches) -> None:
    records = batches.measure(Workload("W", PROMPTS, max_tokens=3, concurrency=1)).records
    assert all(later.offered >= earlier.last_token for earlier, later in itertools.pairwise(records))


def test_an_answer_that_ends_early_is_an_error(model_path: Path) -> None:
    settings = BaselineSettings(model_path, is_dummy=False, device="cpu", num_threads=None, max_batch=2)
    batches = StaticBatches(settings)
    batches._model.generation_config.eos_token_id = list(range(VOCAB_SIZE))
    with pytest.raises(RuntimeError, match="not 3 tokens"):
        batches.measure(Workload("W", PROMPTS, max_tokens=3))


def test_random_weights_need_the_configuration_only(model_path: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((model_path / "config.json").read_bytes())
    settings = BaselineSettings(tmp_path, is_dummy=True, device="cpu", num_threads=None, max_batch=4)
    assert len(StaticBatches(settings).measure(Workload("W", PROMPTS, max_tokens=2)).records) == 3


def test_an_error_over_there_is_raised_here_and_the_process_ends(model_path: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((model_path / "config.json").read_bytes())
    before = multiprocessing.active_children()
    with (
        pytest.raises(EngineError, match="transformers failed") as caught,
        TransformersBaseline(EngineConfig(model=str(tmp_path))),
    ):
        pass
    assert caught.value.code == "internal_error"
    assert multiprocessing.active_children() == before


def test_a_process_that_is_killed_is_an_error(model_path: Path) -> None:
    config = dataclasses.replace(EngineConfig(), model=str(model_path), load_format="dummy")
    with TransformersBaseline(config) as started:
        psutil.Process(started.pid).kill()
        with pytest.raises(EngineError, match="exit code -9"):
            started.measure(Workload("W", PROMPTS, max_tokens=2))


def test_a_model_that_is_not_there_is_found_out_before_anything_starts() -> None:
    with pytest.raises(SetupError):
        TransformersBaseline(EngineConfig(model="./no-such-model"))
