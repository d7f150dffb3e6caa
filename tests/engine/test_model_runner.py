"""Sizing of the cache and the context, precision, and the tensors of one step."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_driver import engine_config
from reference_models import save_reference_model

from mmserve.cache.encoder_cache import EncoderCache
from mmserve.cache.kv_cache import KVCache
from mmserve.config import GIB, CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from mmserve.engine import model_runner
from mmserve.engine.memory import cache_bytes
from mmserve.engine.model_runner import ModelRunner
from mmserve.engine.scheduler import ScheduledBatch, advance
from mmserve.engine.warm_up import warm_up_batches
from mmserve.errors import SetupError
from mmserve.request import SampledToken, SamplingParams, Sequence
from mmserve.weights.checkpoint import open_checkpoint

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reference_model("mistral", tmp_path_factory.mktemp("mistral"), num_hidden_layers=1)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A machine with 8 GiB, of which 6 are free."""
    memory = SimpleNamespace(total=8 * GIB, available=6 * GIB)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    return memory


def runner(config: EngineConfig) -> ModelRunner:
    return ModelRunner(config, open_checkpoint(config.model), EncoderCache(64))


def sized(folder: Path, *, max_model_len: int | None = None, num_blocks: int) -> ModelRunner:
    return runner(replace(engine_config(folder, num_blocks=num_blocks), max_model_len=max_model_len))


def bytes_of(**fields: Any) -> int:
    return cache_bytes(CacheConfig(**fields), torch.device("cpu"))


# How much memory


def test_bytes_as_asked(memory: SimpleNamespace) -> None:
    assert bytes_of(memory_bytes=123456) == 123456
    assert bytes_of(memory_bytes=5 * GIB, memory_utilization=0.1) == 5 * GIB


def test_bytes_that_are_not_free_are_refused(memory: SimpleNamespace) -> None:
    with pytest.raises(SetupError, match=r"--kv-cache-memory-bytes asks for 7\.00 GiB, but 6\.00 GiB") as caught:
        bytes_of(memory_bytes=7 * GIB)
    assert caught.value.code == "insufficient_memory"


def test_utilization_is_a_share_of_the_total_less_what_is_in_use(memory: SimpleNamespace) -> None:
    assert bytes_of(memory_utilization=0.5) == 2 * GIB
    assert bytes_of(memory_utilization=1.0) == 6 * GIB
    assert bytes_of(memory_utilization=0.25) == 0
    assert bytes_of(memory_utilization=0.1) == 0


def test_the_default_of_a_cpu_is_two_gibibytes_or_what_is_free(memory: SimpleNamespace) -> None:
    assert bytes_of() == 2 * GIB
    memory.available = GIB
    assert bytes_of() == GIB


# How long a context


def test_the_cache_holds_as_many_blocks_as_were_paid_for(folder: Path) -> None:
    made = sized(folder, num_blocks=7)
    assert made.kv_cache.num_blocks == 7
    assert made.kv_cache.layers[0].shape[0] == made.kv_cache.num_blocks == 7


def test_part_of_a_block_is_not_a_block(folder: Path) -> None:
    config = engine_config(folder, num_blocks=3)
    assert config.cache.memory_bytes is not None
    less = replace(config, cache=replace(config.cache, memory_bytes=config.cache.memory_bytes - 1))
    assert runner(less).kv_cache.num_blocks == 2


def test_a_sliding_window_bounds_the_context(folder: Path) -> None:
    assert sized(folder, num_blocks=64).max_model_len == 256


def test_a_context_as_asked(folder: Path) -> None:
    assert sized(folder, max_model_len=100, num_blocks=64).max_model_len == 100
    assert sized(folder, max_model_len=100, num_blocks=7).max_model_len == 100


def test_a_context_that_nobody_asked_for_shrinks_to_the_cache(folder: Path) -> None:
    assert sized(folder, num_blocks=3).max_model_len == 48


def test_a_context_that_was_asked_for_and_does_not_fit_is_refused(folder: Path) -> None:
    with pytest.raises(SetupError) as caught:
        sized(folder, max_model_len=100, num_blocks=6)
    assert caught.value.code == "insufficient_memory"
    for part in ("100 tokens", "--kv-cache-memory-bytes", "--gpu-memory-utilization", "--max-model-len"):
        assert part in str(caught.value)


def test_no_room_for_a_single_block_is_refused(folder: Path) -> None:
    with pytest.raises(SetupError, match="GiB") as caught:
        runner(replace(engine_config(folder), cache=CacheConfig(memory_bytes=1)))
    assert caught.value.code == "insufficient_memory"


def test_a_context_beyond_the_model_is_refused(folder: Path) -> None:
    with pytest.raises(SetupError, match="--max-model-len 257 exceeds the 256"):
        sized(folder, max_model_len=257, num_blocks=64)


# Precision and device


def test_precision_as_asked(folder: Path) -> None:
    assert runner(engine_config(folder)).dtype is torch.float32
    half = runner(replace(engine_config(folder), dtype="bfloat16"))
    assert half.dtype is torch.bfloat16
    assert half.kv_cache.layers[0].dtype is torch.bfloat16
    assert half.kv_cache.num_blocks == 512


@pytest.mark.parametrize(("computes_bf16", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_on_a_cpu_is_what_it_computes_fast(
    computes_bf16: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: computes_bf16)
    assert model_runner.choose_dtype("auto", shape(dtype="float16"), torch.device("cpu")) is dtype


def test_auto_on_a_gpu_is_the_checkpoints() -> None:
    cuda = torch.device("cuda")
    assert model_runner.choose_dtype("auto", shape(dtype="float16"), cuda) is torch.float16
    assert model_runner.choose_dtype("float32", shape(dtype="float16"), cuda) is torch.float32


def shape(**fields: Any) -> ModelConfig:
    sizes = dict.fromkeys(
        ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"), 8
    )
    return ModelConfig.from_hf({**sizes, **fields})


@pytest.mark.parametrize("device", ["cuda:99", "nonsense", "meta:x"])
def test_a_device_that_is_not_there_is_named(device: str) -> None:
    with pytest.raises(SetupError, match=f"--device {device}"):
        model_runner.choose_device(device)


# One step


def make_sequence(name: str, tokens: list[int], block_ids: list[int]) -> Sequence:
    return Sequence(name, tokens, GREEDY, block_ids=block_ids)


def test_rows_may_come_in_any_order(folder: Path) -> None:
    """Prompts, chunks and single tokens in one batch, the shorter contexts first."""
    made = sized(folder, num_blocks=32)
    prompts = {"a": [5] * 3, "b": [6] * 20, "c": [7] * 40, "d": [8]}

    def sequences() -> list[Sequence]:
        tables = [[0], [4, 9], [20, 2, 11], [7]]
        return [
            make_sequence(name, prompt, table) for (name, prompt), table in zip(prompts.items(), tables, strict=True)
        ]

    alone: dict[str, SampledToken] = {}
    for sequence in sequences():
        alone |= made.run(ScheduledBatch((advance(sequence, sequence.num_tokens),))).take()
    together = sequences()
    made.run(ScheduledBatch((advance(together[1], 19), advance(together[2], 13))))
    batch = ScheduledBatch(tuple(advance(each, each.num_tokens - each.num_computed_tokens) for each in together))
    assert made.run(batch).take() == alone


def test_a_chunk_that_does_not_reach_the_end_samples_nothing(folder: Path) -> None:
    made = sized(folder, num_blocks=4)
    assert made.run(ScheduledBatch((advance(make_sequence("a", [5] * 20, [1, 2]), 10),))).take() == {}


@pytest.mark.parametrize("max_num_batched_tokens", [1, 2, 2048])
def test_warming_up_writes_to_block_0_only(folder: Path, max_num_batched_tokens: int) -> None:
    made = runner(engine_config(folder, num_blocks=4, max_num_batched_tokens=max_num_batched_tokens))
    made.warm_up()
    (layer,) = made.kv_cache.layers
    assert bool(layer[0].any())
    assert not bool(layer[1:].any())


@pytest.mark.parametrize(("block_size", "max_model_len"), [(1, None), (16, 2), (4, 3)])
def test_warming_up_the_smallest_contexts(folder: Path, block_size: int, max_model_len: int | None) -> None:
    config = replace(engine_config(folder, num_blocks=8, block_size=block_size), max_model_len=max_model_len)
    made = runner(config)
    made.warm_up()
    assert bool(made.kv_cache.layers[0][0].any()), "block 0 was written"


@pytest.mark.parametrize(
    ("scheduler", "max_model_len", "expected"),
    [
        (SchedulerConfig(max_num_batched_tokens=100), 256, [16, 24, 32, 48, 64, 96, 100]),
        (SchedulerConfig(max_num_batched_tokens=100, max_num_seqs=2), 21, [16, 24, 32, 40]),
        (SchedulerConfig(max_num_batched_tokens=1), 256, [1]),
        (SchedulerConfig(max_num_batched_tokens=20, max_num_seqs=1), 256, [16, 20]),
        (SchedulerConfig(max_num_seqs=3), 2, [3]),
    ],
)
def test_a_gpu_runs_steps_of_many_sizes_first(
    folder: Path, scheduler: SchedulerConfig, max_model_len: int, expected: list[int]
) -> None:
    """All of which a runner can take."""
    config = replace(engine_config(folder, num_blocks=16), scheduler=scheduler, max_model_len=max_model_len)
    made = runner(replace(config, async_scheduling=True))
    batches = list(warm_up_batches(scheduler, max_model_len=max_model_len, block_size=16, on_gpu=True))
    steps = [batch.num_tokens for batch in batches]
    assert steps[-len(expected) :] == expected
    assert max(len(batch.sequences) for batch in batches) <= scheduler.max_num_seqs
    for batch in batches:
        assert len(made.run(batch).take()) == len(batch.sequences)


def test_threads_as_asked(folder: Path) -> None:
    before = torch.get_num_threads()
    try:
        runner(replace(engine_config(folder), num_threads=2))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_bytes_per_block_follow_the_precision(folder: Path) -> None:
    model = ModelConfig.from_hf(open_checkpoint(str(folder)).config)
    full, half = (KVCache.bytes_per_block(model, 16, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert full == 2 * half
