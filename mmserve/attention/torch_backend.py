"""Attention through block tables with PyTorch's fused attention. The backend of the CPU; runs on any device."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mmserve.attention.base import AttentionBatch
from mmserve.attention.context import ForwardContext
from mmserve.kernels.reference import causal_attention, paged_attention_chunk, paged_attention_decode, store_kv


@dataclass(frozen=True)
class DecodeGroup:
    """Rows with one query each and contexts of similar length, padded to the longest."""

    rows: slice
    block_ids: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True)
class Chunk:
    """Rows of one sequence; without block ids it is the sequence's start and attends to itself only."""

    rows: slice
    block_ids: torch.Tensor | None
    mask: torch.Tensor | None


@dataclass(frozen=True)
class TorchAttentionMetadata:
    groups: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]


class TorchAttention:
    """Decoding sequences are gathered in padded groups, chunks run one by one."""

    def __init__(self, *, head_dim: int, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._scale = head_dim**-0.5
        self._block_size = block_size
        self._dtype = dtype
        self._device = device

    def prepare(self, batch: AttentionBatch) -> TorchAttentionMetadata:
        num_decodes = sum(1 for length in batch.query_lens if length == 1)
        assert all(length == 1 for length in batch.query_lens[:num_decodes]), "single queries come first"
        return TorchAttentionMetadata(self._groups(batch, num_decodes), self._chunks(batch, num_decodes))

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, context: ForwardContext
    ) -> torch.Tensor:
        metadata = context.attention
        assert isinstance(metadata, TorchAttentionMetadata)
        kv_cache = context.kv_caches[layer]
        store_kv(k, v, kv_cache, context.slot_mapping)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for group in metadata.groups:
            out[group.rows] = paged_attention_decode(q[group.rows], kv_cache, group.block_ids, group.mask, self._scale)
        for chunk in metadata.chunks:
            out[chunk.rows] = self._attend_chunk(q[chunk.rows], k[chunk.rows], v[chunk.rows], kv_cache, chunk)
        return out

    def _attend_chunk(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, chunk: Chunk
    ) -> torch.Tensor:
        if chunk.block_ids is None or chunk.mask is None:
            return causal_attention(q, k, v, self._scale)
        return paged_attention_chunk(q, kv_cache, chunk.block_ids, chunk.mask, self._scale)

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
        block_ids = [block for table in tables for block in _padded(table, num_blocks)]
        key_positions = torch.arange(num_blocks * self._block_size, device=self._device)
        visible = key_positions < torch.tensor(context_lens, device=self._device)[:, None]
        return DecodeGroup(slice(start, stop), self._ids(block_ids), self._additive(visible)[:, None, None])

    def _chunks(self, batch: AttentionBatch, num_decodes: int) -> tuple[Chunk, ...]:
        chunks, row = [], num_decodes
        for i in range(num_decodes, len(batch.query_lens)):
            query_len, context_len = batch.query_lens[i], batch.context_lens[i]
            rows = slice(row, row + query_len)
            chunks.append(self._chunk(rows, query_len, context_len, batch.block_tables[i]))
            row += query_len
        return tuple(chunks)

    def _chunk(self, rows: slice, query_len: int, context_len: int, table: Sequence[int]) -> Chunk:
        if query_len == context_len:
            return Chunk(rows, None, None)
        query_positions = torch.arange(context_len - query_len, context_len, device=self._device)
        visible = torch.arange(context_len, device=self._device) <= query_positions[:, None]
        return Chunk(rows, self._ids(table[: self._num_blocks(context_len)]), self._additive(visible))

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _ids(self, block_ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(block_ids, dtype=torch.int64, device=self._device)

    def _additive(self, visible: torch.Tensor) -> torch.Tensor:
        return torch.zeros(visible.shape, dtype=self._dtype, device=self._device).masked_fill_(~visible, float("-inf"))


def _padded(table: Sequence[int], num_blocks: int) -> list[int]:
    return [*table[:num_blocks], *[0] * (num_blocks - len(table))]
