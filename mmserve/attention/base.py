"""What an attention backend is told about a step, and what it must do."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from mmserve.attention.context import ForwardContext
from mmserve.attention.kv_scales import KVScales
from mmserve.kernels.reference import rms_norm


@dataclass(frozen=True)
class AttentionBatch:
    """The sequences of a step in row order: those with one query first, longest context first, then chunks.

    `context_lens` count the tokens attended to, those of this step included; `block_tables` cover them.
    """

    query_lens: Sequence[int]
    context_lens: Sequence[int]
    block_tables: Sequence[Sequence[int]]

    def slots(self, block_size: int) -> npt.NDArray[np.int64]:
        """Where this step's K and V belong, row by row: `block_id * block_size + offset`."""
        slots, row = np.empty(sum(self.query_lens), dtype=np.int64), 0
        for query_len, context_len, table in zip(self.query_lens, self.context_lens, self.block_tables, strict=True):
            if query_len == 1:
                block, offset = divmod(context_len - 1, block_size)
                slots[row] = table[block] * block_size + offset
            else:
                blocks, offsets = np.divmod(np.arange(context_len - query_len, context_len), block_size)
                slots[row : row + query_len] = np.array(table, dtype=np.int64)[blocks] * block_size + offsets
            row += query_len
        return slots


_NO_SCALES = KVScales()


@dataclass(frozen=True)
class AttentionLayer:
    """One layer's number and query heads; with Qwen3's norms on the heads of q and k, their weights `[D]`."""

    index: int
    num_heads: int
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    norm_eps: float = 0.0
    scales: KVScales = field(default_factory=KVScales)

    def scales_of(self, kv_cache: torch.Tensor) -> KVScales:
        """Those that this cache is stored with: a cache that is not in FP8 has none."""
        return self.scales if kv_cache.dtype is torch.float8_e4m3fn else _NO_SCALES

    def fit_scales(self, qkv: torch.Tensor, num_kv_heads: int) -> None:
        """Of qkv `[T, H + 2 * KV, D]` as the layer's projection gives them."""
        k, v = qkv[:, self.num_heads : -num_kv_heads], qkv[:, -num_kv_heads:]
        if self.k_norm is not None:
            k = rms_norm(k, self.k_norm, self.norm_eps)
        self.scales.fit(k, v)


class AttentionBackend(Protocol):
    def prepare(self, batch: AttentionBatch) -> object:
        """Whatever every layer of this step needs; it travels as `ForwardContext.attention`."""

    def forward(self, qkv: torch.Tensor, layer: AttentionLayer, context: ForwardContext) -> torch.Tensor:
        """Queries, keys and values `[T, H + 2 * KV, D]` -> `[T, H, D]`.

        Norms and rotates q and k, maybe in place, stores k and v at the step's slots, and attends.
        """
