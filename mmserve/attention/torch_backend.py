"""Attention through block tables with PyTorch's own products. The backend of the CPU; runs on any device."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mmserve.attention.base import AttentionBatch, AttentionLayer
from mmserve.attention.context import ForwardContext
from mmserve.kernels.cpu import (
    causal_attention,
    gather_rows,
    paged_attention_chunk,
    paged_attention_decode,
    store_kv,
    store_rows,
)
from mmserve.kernels.reference import apply_rotary, rms_norm


@dataclass(frozen=True)
class DecodeGroup:
    """Rows with one query each and contexts of similar length, padded to the longest; where to gather K and V."""

    rows: slice
    kv_rows: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True)
class Chunk:
    """Rows of one sequence; without `kv_rows` it is the sequence's start and attends to itself only."""

    rows: slice
    context_len: int
    kv_rows: torch.Tensor | None


@dataclass(frozen=True)
class TorchAttentionMetadata:
    """`stored_rows` is where the step's own K and V go."""

    stored_rows: torch.Tensor
    groups: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]


class TorchAttention:
    """Decoding sequences are gathered in padded groups, chunks run one by one."""

    def __init__(
        self, *, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._num_kv_heads = num_kv_heads
        self._scale = head_dim**-0.5
        self._block_size = block_size
        self._dtype = dtype
        self._device = device

    def prepare(self, batch: AttentionBatch) -> TorchAttentionMetadata:
        num_decodes = sum(1 for length in batch.query_lens if length == 1)
        assert all(length == 1 for length in batch.query_lens[:num_decodes]), "single queries come first"
        slot_mapping = torch.from_numpy(batch.slots(self._block_size)).to(self._device)
        return TorchAttentionMetadata(
            store_rows(slot_mapping, self._num_kv_heads, self._block_size),
            self._groups(batch, num_decodes),
            self._chunks(batch, num_decodes),
        )

    def forward(self, qkv: torch.Tensor, layer: AttentionLayer, context: ForwardContext) -> torch.Tensor:
        metadata = context.attention
        assert isinstance(metadata, TorchAttentionMetadata)
        kv_cache = context.kv_caches[layer.index]
        q, k, v = _rotated(qkv, self._num_kv_heads, layer, context)
        store_kv(k, v, kv_cache, metadata.stored_rows)
        if len(metadata.groups) == 1 and not metadata.chunks:
            group = metadata.groups[0]
            return paged_attention_decode(q, kv_cache, group.kv_rows, group.mask, self._scale)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for group in metadata.groups:
            out[group.rows] = paged_attention_decode(q[group.rows], kv_cache, group.kv_rows, group.mask, self._scale)
        for chunk in metadata.chunks:
            out[chunk.rows] = self._attend_chunk(q[chunk.rows], k[chunk.rows], v[chunk.rows], kv_cache, chunk)
        return out

    def _attend_chunk(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, chunk: Chunk
    ) -> torch.Tensor:
        if chunk.kv_rows is None:
            heads_first = (k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous())
            return causal_attention(q, *heads_first, self._scale)
        return paged_attention_chunk(q, kv_cache, chunk.kv_rows, chunk.context_len, self._scale)

    def _groups(self, batch: AttentionBatch, num_decodes: int) -> tuple[DecodeGroup, ...]:
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
        num_blocks = max(self._num_blocks(length) for length in context_lens)
        block_ids = self._tensor([block for table in tables for block in _padded(table, num_blocks)])
        key_positions = torch.arange(num_blocks * self._block_size, device=self._device)
        hidden = key_positions >= self._tensor(context_lens)[:, None]
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device).masked_fill_(hidden, -torch.inf)
        kv_rows = gather_rows(block_ids.view(len(tables), -1), self._num_kv_heads)
        return DecodeGroup(slice(start, stop), kv_rows, mask[:, None, None])

    def _chunks(self, batch: AttentionBatch, num_decodes: int) -> tuple[Chunk, ...]:
        chunks, row = [], num_decodes
        for i in range(num_decodes, len(batch.query_lens)):
            query_len, context_len = batch.query_lens[i], batch.context_lens[i]
            kv_rows = None
            if query_len < context_len:
                block_ids = self._tensor(batch.block_tables[i][: self._num_blocks(context_len)])
                kv_rows = gather_rows(block_ids[None], self._num_kv_heads)
            chunks.append(Chunk(slice(row, row + query_len), context_len, kv_rows))
            row += query_len
        return tuple(chunks)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _tensor(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _rotated(
    qkv: torch.Tensor, num_kv_heads: int, layer: AttentionLayer, context: ForwardContext
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q and k, normed and rotated, and v."""
    num_heads, num_rotated = layer.num_heads, layer.num_heads + num_kv_heads
    qk, v = qkv[:, :num_rotated], qkv[:, num_rotated:]
    if layer.q_norm is not None and layer.k_norm is not None:
        q = rms_norm(qk[:, :num_heads], layer.q_norm, layer.norm_eps)
        k = rms_norm(qk[:, num_heads:], layer.k_norm, layer.norm_eps)
        qk = torch.cat((q, k), dim=1)
    qk = apply_rotary(qk, context.cos, context.sin)
    return qk[:, :num_heads], qk[:, num_heads:], v


def _padded(table: Sequence[int], num_blocks: int) -> list[int]:
    """A sequence is padded with a block of its own: what it holds, be it NaN, reaches nobody else."""
    return [*table[:num_blocks], *[table[0]] * (num_blocks - len(table))]
