"""When quantized weights have a copy in bfloat16 beside them."""

import psutil
import pytest
import torch

from mmserve.config import ModelConfig, RopeConfig
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


def test_it_is_kept_where_there_is_four_times_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MODEL.num_matrix_weights == NUM_WEIGHTS
    memory, cpu = psutil.virtual_memory(), torch.device("cpu")
    for available, expected in ((8 * NUM_WEIGHTS, True), (8 * NUM_WEIGHTS - 1, False)):
        free = memory._replace(available=available)
        monkeypatch.setattr(psutil, "virtual_memory", lambda free=free: free)
        assert keeps_dense_copy("auto", MODEL, cpu) is expected
        assert keeps_dense_copy("keep", MODEL, cpu)
        assert not keeps_dense_copy("never", MODEL, cpu)
