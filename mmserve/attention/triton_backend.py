"""Attention through block tables with Triton's kernels. The backend of GPUs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from mmserve.attention.base import AttentionBatch, AttentionLayer
from mmserve.attention.context import ForwardContext
from mmserve.errors import SetupError
from mmserve.kernels.kv_store import rotate_and_store
from mmserve.kernels.paged_chunk import paged_attention_chunk, query_tiles
from mmserve.kernels.paged_decode import QUERY_ROWS, paged_attention_decode
from mmserve.kernels.paged_tiles import MAX_BLOCK_SIZE, MAX_HEAD_DIM, can_tile
from mmserve.kernels.transfer import to_device

IntArray = npt.NDArray[np.int32]
# Sequences that share their first blocks are read together from so many on, if they share so many tokens.
MIN_SHARING_SEQUENCES = 4
MIN_SHARED_TOKENS = 256


@dataclass(frozen=True)
class DecodeTables:
    """S sequences with one query each: block tables `[S, max_blocks]` and context lengths `[S]`, int32.

    The first `num_shared_blocks` `[1]` blocks are the same for all of them. No context exceeds `max_context_len`.
    """

    block_tables: torch.Tensor
    context_lens: torch.Tensor
    max_context_len: int
    num_shared_blocks: torch.Tensor | None = None


@dataclass(frozen=True)
class ChunkTables:
    """Sequences with several queries each, as `paged_attention_chunk` takes them."""

    block_tables: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    tiles: torch.Tensor


@dataclass(frozen=True)
class TritonAttentionMetadata:
    """Where the step's K and V go, `[T]` int64, and what its rows attend to: first single queries, then chunks."""

    slot_mapping: torch.Tensor
    decodes: DecodeTables | None
    chunks: ChunkTables | None


class TritonAttention:
    """Decoding sequences and chunks take one kernel each."""

    def __init__(
        self, *, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, device: torch.device
    ) -> None:
        """Raises `SetupError` for heads and blocks that the kernels cannot take."""
        _check_heads(num_heads // num_kv_heads, head_dim)
        if not can_tile(block_size):
            raise SetupError(
                "model_unavailable",
                f"--block-size {block_size} cannot be used on a GPU: take a power of two from 1 to {MAX_BLOCK_SIZE}",
                param="block-size",
            )
        self._scale = head_dim**-0.5
        self._block_size = block_size
        self._device = device

    def prepare(self, batch: AttentionBatch) -> TritonAttentionMetadata:
        num_decodes = sum(1 for length in batch.query_lens if length == 1)
        return TritonAttentionMetadata(
            self._tensor(batch.slots(self._block_size)),
            self._decodes(batch, num_decodes) if num_decodes else None,
            self._chunks(batch, num_decodes) if num_decodes < len(batch.query_lens) else None,
        )

    def forward(self, qkv: torch.Tensor, layer: AttentionLayer, context: ForwardContext) -> torch.Tensor:
        metadata = context.attention
        assert isinstance(metadata, TritonAttentionMetadata)
        kv_cache = context.kv_caches[layer.index]
        scales = layer.scales_of(kv_cache)
        if context.fits_scales:
            layer.fit_scales(qkv, kv_cache.shape[2])
        q = rotate_and_store(
            qkv,
            context.cos,
            context.sin,
            kv_cache,
            metadata.slot_mapping,
            layer.num_heads,
            q_weight=layer.q_norm,
            k_weight=layer.k_norm,
            eps=layer.norm_eps,
            k_scale=scales.k,
            v_scale=scales.v,
        )
        out = torch.empty_like(q)
        num_decodes = len(metadata.decodes.context_lens) if metadata.decodes else 0
        if metadata.decodes is not None:
            self._decode(q[:num_decodes], kv_cache, metadata.decodes, self._scale * scales.k, out[:num_decodes])
        if metadata.chunks is not None:
            self._attend_chunks(q[num_decodes:], kv_cache, metadata.chunks, self._scale * scales.k, out[num_decodes:])
        return out if scales.v == 1.0 else out.mul_(scales.v)

    def _decode(
        self, q: torch.Tensor, kv_cache: torch.Tensor, tables: DecodeTables, scale: float, out: torch.Tensor
    ) -> None:
        paged_attention_decode(
            q,
            kv_cache,
            tables.block_tables,
            tables.context_lens,
            scale,
            num_shared_blocks=tables.num_shared_blocks,
            max_context_len=tables.max_context_len,
            out=out,
        )

    def _attend_chunks(
        self, q: torch.Tensor, kv_cache: torch.Tensor, tables: ChunkTables, scale: float, out: torch.Tensor
    ) -> None:
        paged_attention_chunk(
            q,
            kv_cache,
            tables.block_tables,
            tables.query_starts,
            tables.context_lens,
            tables.tiles,
            scale,
            out=out,
        )

    def _decodes(self, batch: AttentionBatch, num_decodes: int) -> DecodeTables:
        context_lens = batch.context_lens[:num_decodes]
        tables = padded_tables(batch.block_tables[:num_decodes])
        num_shared = num_shared_blocks(tables, context_lens, self._block_size)
        return DecodeTables(
            self._tensor(tables),
            self._tensor(np.array(context_lens, dtype=np.int32)),
            max(context_lens),
            self._tensor(np.array([num_shared], dtype=np.int32)) if num_shared else None,
        )

    def _chunks(self, batch: AttentionBatch, num_decodes: int) -> ChunkTables:
        query_lens = batch.query_lens[num_decodes:]
        return ChunkTables(
            self._tensor(padded_tables(batch.block_tables[num_decodes:])),
            self._tensor(np.cumsum([0, *query_lens], dtype=np.int32)),
            self._tensor(np.array(batch.context_lens[num_decodes:], dtype=np.int32)),
            self._tensor(query_tiles(query_lens)),
        )

    def _tensor(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        return to_device(values, self._device)


def _check_heads(group_size: int, head_dim: int) -> None:
    """`group_size` query heads share a KV head."""
    if head_dim > MAX_HEAD_DIM:
        raise SetupError(
            "model_unavailable",
            f"this model has heads of size {head_dim}, and a GPU takes up to {MAX_HEAD_DIM}: run it with --device cpu",
        )
    if group_size > QUERY_ROWS:
        raise SetupError(
            "model_unavailable",
            f"this model has {group_size} query heads to a KV head, and a GPU takes up to {QUERY_ROWS}: "
            "run it with --device cpu",
        )


def padded_tables(block_tables: Sequence[Sequence[int]]) -> IntArray:
    """Block tables as one array `[S, longest]`; what pads the shorter ones is never read."""
    tables = np.zeros((len(block_tables), max(map(len, block_tables))), dtype=np.int32)
    for row, table in zip(tables, block_tables, strict=True):
        row[: len(table)] = table
    return tables


def num_shared_blocks(tables: IntArray, context_lens: Sequence[int], block_size: int) -> int:
    """How many leading blocks all sequences have in common, every one of which has tokens beyond them; 0 if few."""
    if len(tables) < MIN_SHARING_SEQUENCES or tables[0, 0] != tables[-1, 0]:
        return 0
    most = (min(context_lens) - 1) // block_size
    differs = (tables[:, :most] != tables[0, :most]).any(axis=0)
    num_shared = int(differs.argmax()) if differs.any() else most
    return num_shared if num_shared * block_size >= MIN_SHARED_TOKENS else 0
