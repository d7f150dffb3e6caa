"""The paged tensors: one a layer, of the size that was paid for."""

import pytest
import torch

from mmserve.cache.kv_cache import KVCache
from mmserve.config import ModelConfig, RopeConfig

MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=10,
    hidden_size=32,
    intermediate_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    rope=RopeConfig(),
    max_position_embeddings=64,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [1, 16])
def test_takes_the_bytes_it_says(dtype: torch.dtype, block_size: int) -> None:
    cache = KVCache(MODEL, num_blocks=5, block_size=block_size, dtype=dtype, device=torch.device("cpu"))
    assert sum(layer.nbytes for layer in cache.layers) == 5 * KVCache.bytes_per_block(MODEL, block_size, dtype)


def test_each_layer_has_its_own_zeroed_blocks() -> None:
    cache = KVCache(MODEL, num_blocks=5, block_size=4, dtype=torch.float32, device=torch.device("cpu"))
    assert [layer.shape for layer in cache.layers] == [(5, 2, 2, 4, 16)] * 3
    # The end of a block is read before anybody wrote to it: what is not a number there would spread.
    assert all(bool((layer == 0).all()) for layer in cache.layers)
    cache.layers[0].fill_(1.0)
    assert bool((cache.layers[1] == 0).all())


def test_bytes_count_grouped_heads_only() -> None:
    assert KVCache.bytes_per_block(MODEL, 16, torch.bfloat16) == 3 * 16 * 2 * 2 * 16 * 2
