"""When quantized weights have a copy in bfloat16 beside them."""

import psutil
import pytest
import torch

from mmserve.config import CacheConfig, ModelConfig, RopeConfig
from mmserve.engine.memory import keeps_dense_copy

MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=100,
    hidden_size=32,
    intermediate_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    max_position_embeddings=64,
)
# q and o, k and v, the feed-forward; the output layer.
NUM_WEIGHTS = 3 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64) + 100 * 32


CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_it_is_kept_where_there_is_four_times_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MODEL.num_matrix_weights == NUM_WEIGHTS
    memory = psutil.virtual_memory()
    for available, expected in ((8 * NUM_WEIGHTS, True), (8 * NUM_WEIGHTS - 1, False)):
        free = memory._replace(available=available)
        monkeypatch.setattr(psutil, "virtual_memory", lambda free=free: free)
        assert keeps_dense_copy("auto", MODEL, CacheConfig(), CPU) is expected
        assert keeps_dense_copy("keep", MODEL, CacheConfig(), CPU)
        assert not keeps_dense_copy("never", MODEL, CacheConfig(), CPU)


@pytest.mark.parametrize(("utilization", "num_used"), [(0.5, 0), (0.5, 1000), (None, 0)])
def test_on_a_gpu_it_is_the_memory_that_may_be_used(
    monkeypatch: pytest.MonkeyPatch, utilization: float | None, num_used: int
) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    for wanted, expected in ((8 * NUM_WEIGHTS + 10, True), (8 * NUM_WEIGHTS - 10, False)):
        total = int((wanted + num_used) / (utilization or 0.9))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device, total=total: (total - num_used, total))
        assert keeps_dense_copy("auto", MODEL, CacheConfig(memory_utilization=utilization), GPU) is expected
