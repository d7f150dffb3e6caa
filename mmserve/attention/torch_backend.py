"""Attention through block tables with PyTorch's own products, for a CPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from mmserve.attention.base import AttentionBatch, AttentionLayer
from mmserve.attention.context import ForwardContext
from mmserve.kernels.cpu import (
    IntArray,
    causal_attention,
    gather_rows,
    paged_attention_chunk,
    paged_attention_decode,
    rotate_,
    store_kv,
    store_rows,
)
from mmserve.kernels.reference import rms_norm


class Decodes(Protocol):
    """Rows with one query each, and how these attend."""

    @property
    def rows(self) -> slice: ...

    def attend(self, q: torch.Tensor, kv_cache: torch.Tensor, scale: float) -> torch.Tensor:
        """q `[S, H, D]` of the rows -> `[S, H, D]`."""


@dataclass(frozen=True)
class DecodeGroup:
    """Contexts of similar length, padded to the longest; where to gather K and V."""

    rows: slice
    kv_rows: torch.Tensor
    mask: torch.Tensor

    def attend(self, q: torch.Tensor, kv_cache: torch.Tensor, scale: float) -> torch.Tensor:
        return paged_attention_decode(q, kv_cache, self.kv_rows, self.mask, scale)


@dataclass(frozen=True)
class Chunk:
    """Rows of one sequence; without `kv_rows` it is the sequence's start and attends to itself."""

    rows: slice
    context_len: int
    kv_rows: torch.Tensor | None


@dataclass(frozen=True)
class CpuAttentionMetadata:
    """`stored` is where the step's own K and V go, as the backend's kernels take it."""

    stored: torch.Tensor
    decodes: tuple[Decodes, ...]
    chunks: tuple[Chunk, ...]


class TorchAttention:
    """Decoding sequences are gathered in padded groups, chunks run one by one."""

    def __init__(
        self, *, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, rounds_kv: bool = False
    ) -> None:
        """`rounds_kv`: the cache is in a smaller precision than `dtype`."""
        self._num_kv_heads = num_kv_heads
        self._scale = head_dim**-0.5
        self._block_size = block_size
        self._dtype = dtype
        self._rounds_kv = rounds_kv

    def prepare(self, batch: AttentionBatch) -> CpuAttentionMetadata:
        num_decodes = sum(1 for length in batch.query_lens if length == 1)
        assert all(length == 1 for length in batch.query_lens[:num_decodes]), "single queries come first"
        return CpuAttentionMetadata(
            self._stored(batch.slots(self._block_size)),
            self._decodes(batch, num_decodes),
            self._chunks(batch, num_decodes),
        )

    def forward(self, qkv: torch.Tensor, layer: AttentionLayer, context: ForwardContext) -> torch.Tensor:
        metadata = context.attention
        assert isinstance(metadata, CpuAttentionMetadata)
        kv_cache = context.kv_caches[layer.index]
        scales = layer.scales_of(kv_cache)
        if context.fits_scales:
            layer.fit_scales(qkv, self._num_kv_heads)
        self._rotate_and_store(qkv, layer, context, metadata.stored)
        out = self._attend(qkv, layer.num_heads, kv_cache, metadata, self._scale * scales.k)
        return out if scales.v == 1.0 else out.mul_(scales.v)

    def _rotate_and_store(
        self, qkv: torch.Tensor, layer: AttentionLayer, context: ForwardContext, stored: torch.Tensor
    ) -> None:
        """In place; keys and values to the layer's cache, too."""
        kv_cache, num_rotated = context.kv_caches[layer.index], layer.num_heads + self._num_kv_heads
        scales = layer.scales_of(kv_cache)
        _norm_heads(qkv, num_rotated, layer)
        rotate_(qkv[:, :num_rotated], context.cos, context.sin)
        store_kv(qkv[:, layer.num_heads :], kv_cache, stored, scales.k, scales.v)

    def _attend(
        self,
        qkv: torch.Tensor,
        num_heads: int,
        kv_cache: torch.Tensor,
        metadata: CpuAttentionMetadata,
        scale: float,
    ) -> torch.Tensor:
        num_rotated = num_heads + self._num_kv_heads
        q = qkv[:, :num_heads]
        if len(metadata.decodes) == 1 and not metadata.chunks:
            return metadata.decodes[0].attend(q, kv_cache, scale)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for group in metadata.decodes:
            out[group.rows] = group.attend(q[group.rows], kv_cache, scale)
        k, v = qkv[:, num_heads:num_rotated], qkv[:, num_rotated:]
        for chunk in metadata.chunks:
            out[chunk.rows] = self._attend_chunk(q[chunk.rows], k[chunk.rows], v[chunk.rows], kv_cache, chunk, scale)
        return out

    def _attend_chunk(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: torch.Tensor,
        chunk: Chunk,
        scale: float,
    ) -> torch.Tensor:
        if chunk.kv_rows is None:
            heads_first = (k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous())
            return causal_attention(q, *heads_first, scale)
        return paged_attention_chunk(q, kv_cache, chunk.kv_rows, chunk.context_len, scale)

    def _stored(self, slots: IntArray) -> torch.Tensor:
        return store_rows(slots, self._num_kv_heads, self._block_size)

    def _decodes(self, batch: AttentionBatch, num_decodes: int) -> tuple[Decodes, ...]:
        """Split where a context is shorter than half of the group's longest, so that padding stays below one half."""
        groups, start = [], 0
        while start < num_decodes:
            stop = start + 1
            while stop < num_decodes and batch.context_lens[stop] * 2 >= batch.context_lens[start]:
                stop += 1
            groups.append(self._group(batch, start, stop))
            start = stop
        return tuple(groups)

    def _group(self, batch: AttentionBatch, start: int, stop: int) -> DecodeGroup:
        context_lens, tables = batch.context_lens[start:stop], batch.block_tables[start:stop]
        num_blocks = max(map(self._num_blocks, context_lens))
        block_ids = np.array([_padded(table, num_blocks) for table in tables])
        hidden = np.arange(num_blocks * self._block_size) >= np.array(context_lens)[:, None]
        mask = torch.from_numpy(np.where(hidden, -np.inf, 0.0)).to(self._dtype)
        return DecodeGroup(slice(start, stop), gather_rows(block_ids, self._num_kv_heads), mask[:, None, None])

    def _chunks(self, batch: AttentionBatch, num_decodes: int) -> tuple[Chunk, ...]:
        chunks, row = [], num_decodes
        for i in range(num_decodes, len(batch.query_lens)):
            query_len, context_len = batch.query_lens[i], batch.context_lens[i]
            kv_rows = None
            # What later steps read back rounded, the chunk itself reads so too: a prefix found again changes nothing.
            if query_len < context_len or self._rounds_kv:
                block_ids = np.array([batch.block_tables[i][: self._num_blocks(context_len)]])
                kv_rows = gather_rows(block_ids, self._num_kv_heads)
            chunks.append(Chunk(slice(row, row + query_len), context_len, kv_rows))
            row += query_len
        return tuple(chunks)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)


def _norm_heads(qkv: torch.Tensor, num_rotated: int, layer: AttentionLayer) -> None:
    """Norm the heads of q and k in place, where the layer has weights for it."""
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = qkv[:, : layer.num_heads], qkv[:, layer.num_heads : num_rotated]
        q.copy_(rms_norm(q, layer.q_norm, layer.norm_eps))
        k.copy_(rms_norm(k, layer.k_norm, layer.norm_eps))


def _padded(table: Sequence[int], num_blocks: int) -> list[int]:
    """A sequence is padded with a block of its own: what it holds, be it NaN, reaches nobody else."""
    return [*table[:num_blocks], *[table[0]] * (num_blocks - len(table))]
