"""The paged tensors, nothing else."""

import math

import numpy as np
import torch

from mmserve.config import ModelConfig


class KVCache:
    """One tensor a layer: `[num_blocks, block_size, 2, num_kv_heads, head_dim]`; K is 0 on the third axis, V is 1.

    K and V of a token lie side by side, so that one gather by block reads both.
    """

    def __init__(
        self, config: ModelConfig, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (num_blocks, block_size, 2, config.num_kv_heads, config.head_dim)
        self.layers = [_zeros(shape, dtype, device) for _ in range(config.num_layers)]

    @staticmethod
    def bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
        return config.num_layers * block_size * 2 * config.num_kv_heads * config.head_dim * dtype.itemsize


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU the pages of memory are only taken when they are first written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(memory).view(dtype).view(shape)
