"""Attention through block tables with compiled kernels, for a CPU in bfloat16."""

from dataclasses import dataclass

import numpy as np
import torch

from mmserve.attention.base import AttentionBatch, AttentionLayer
from mmserve.attention.context import ForwardContext
from mmserve.attention.torch_backend import CpuAttentionMetadata, TorchAttention
from mmserve.kernels.cpu import IntArray
from mmserve.kernels.cpu_decode import paged_attention_decode
from mmserve.kernels.cpu_fused import rotate_and_store


@dataclass(frozen=True)
class PagedDecodes:
    """Rows with one query each, of contexts `[S]` in blocks `[S, max_blocks]`; int64."""

    rows: slice
    block_tables: torch.Tensor
    context_lens: torch.Tensor

    def attend(self, q: torch.Tensor, kv_cache: torch.Tensor, scale: float) -> torch.Tensor:
        return paged_attention_decode(q, kv_cache, self.block_tables, self.context_lens, scale)


def decode_metadata(
    slots: torch.Tensor, block_tables: torch.Tensor, context_lens: torch.Tensor
) -> CpuAttentionMetadata:
    """Of S sequences with one query each, in tensors that may be filled anew from step to step; int64."""
    return CpuAttentionMetadata(slots, (PagedDecodes(slice(0, len(slots)), block_tables, context_lens),), ())


class CompiledAttention(TorchAttention):
    """Decoding sequences run together, where their K and V lie; chunks are PyTorch's."""

    def _stored(self, slots: IntArray) -> torch.Tensor:
        return torch.from_numpy(slots)

    def _rotate_and_store(
        self, qkv: torch.Tensor, layer: AttentionLayer, context: ForwardContext, stored: torch.Tensor
    ) -> None:
        rotate_and_store(
            qkv,
            context.cos,
            context.sin,
            context.kv_caches[layer.index],
            stored,
            layer.num_heads,
            q_weight=layer.q_norm,
            k_weight=layer.k_norm,
            eps=layer.norm_eps,
        )

    def _decodes(self, batch: AttentionBatch, num_decodes: int) -> tuple[PagedDecodes, ...]:
        if num_decodes == 0:
            return ()
        lengths = np.array(batch.context_lens[:num_decodes], dtype=np.int64)
        tables = np.zeros((num_decodes, self._num_blocks(int(lengths.max()))), dtype=np.int64)
        for table, row in zip(batch.block_tables, tables, strict=False):
            row[: len(table)] = table[: len(row)]
        return (PagedDecodes(slice(0, num_decodes), torch.from_numpy(tables), torch.from_numpy(lengths)),)
