"""Causal attention of chunks, several queries a sequence, over their paged contexts (FlashAttention-2, Dao 2023)."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from mmserve.kernels.paged_tiles import (
    Tiles,
    attend,
    dot_precision,
    empty_softmax,
    load_rows,
    padded_head_dim,
    store_rows,
)
from mmserve.kernels.reference import QUERY_TILE

# By bytes an element. On an H200 at 128, bf16, tiles of 64 queries (128 with 8 warps): 379 TFLOP/s (346) for prompts of
# 2831 tokens, 133 (115) for 32 of 256, 423 (211) for 128 times 64 new tokens over 2048.
CHUNK_TILES = {2: Tiles(64, 4, 3), 4: Tiles(32, 4, 2)}


def query_tiles(query_lens: Sequence[int]) -> npt.NDArray[np.int32]:
    """The tiles of a step, `[N, 2]`: sequence, first query in it. The latest come first, which see most keys."""
    tiles = [(i, first) for i, query_len in enumerate(query_lens) for first in range(0, query_len, QUERY_TILE)]
    return np.array(sorted(tiles, key=lambda each: -each[1]), dtype=np.int32).reshape(-1, 2)


def paged_attention_chunk(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    tiles: torch.Tensor,
    scale: float,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The last queries of each sequence, `[T, H, D]` packed at `query_starts` `[S + 1]`, attend to what precedes them.

    Query i of n, in a context of c tokens, sees the first c - n + i + 1. `tiles` are the `query_tiles` of the n.
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, block_size = kv_cache.shape[2:4]
    choice, out = CHUNK_TILES[q.element_size()], torch.empty_like(q) if out is None else out
    assert all(x.is_contiguous() for x in (q, kv_cache, query_starts, context_lens, tiles, out)), (
        "only tables may have a stride"
    )
    assert block_tables.stride(1) == 1, "a table's blocks lie side by side"
    assert choice.block_n % block_size == 0, "a tile of keys is made of whole blocks"
    _chunk_kernel[(len(tiles), num_heads)](
        out,
        q,
        kv_cache,
        block_tables,
        block_tables.stride(0),
        query_starts,
        context_lens,
        tiles,
        scale * math.log2(math.e),
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        GROUP=num_heads // num_kv_heads,
        BLOCK_M=QUERY_TILE,
        BLOCK_N=choice.block_n,
        BLOCK_D=padded_head_dim(head_dim),
        PRECISION=dot_precision(q.dtype),
        num_warps=choice.num_warps,
        num_stages=choice.num_stages,
    )
    return out


# The engine cuts these out of a step's tensors, anywhere: their alignment must not compile anything anew.
_CUT_ANYWHERE = ["block_tables", "query_starts", "context_lens", "tiles"]


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=_CUT_ANYWHERE)
def _chunk_kernel(
    out,
    q,
    kv_cache,
    block_tables,
    table_stride,
    query_starts,
    context_lens,
    tiles,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: a tile of a sequence's queries, one query head. Heads are the slow axis: those at work share K."""
    i_tile, i_head, num_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    i_seq, first_query = tl.load(tiles + i_tile * 2), tl.load(tiles + i_tile * 2 + 1)
    query_start, context_len = tl.load(query_starts + i_seq), tl.load(context_lens + i_seq)
    query_len = tl.load(query_starts + i_seq + 1) - query_start
    o_m = first_query + tl.arange(0, BLOCK_M)
    m_m = o_m < query_len
    o_rows = ((query_start + o_m).to(tl.int64) * num_heads + i_head) * HEAD_DIM
    b_q = load_rows(q + o_rows, m_m, HEAD_DIM, BLOCK_D, True)
    p_keys = kv_cache + i_head // GROUP * (BLOCK_SIZE * HEAD_DIM)
    p_table = block_tables + i_seq.to(tl.int64) * table_stride
    b_positions = context_len - query_len + o_m
    first_position = context_len - query_len + first_query
    # The first query sees all of these keys, and so do the others; then comes the diagonal.
    whole = (first_position + 1) // BLOCK_N * BLOCK_N
    end = tl.minimum(first_position + BLOCK_M, context_len)
    b_acc, b_max, b_sum = empty_softmax(BLOCK_M, BLOCK_D)
    b_acc, b_max, b_sum = attend(
        b_acc, b_max, b_sum, b_q, p_keys, p_table, 0, whole, b_positions, scale, num_heads // GROUP,
        HEAD_DIM, BLOCK_SIZE, BLOCK_N, False, False, PRECISION,
    )  # fmt: skip
    b_acc, b_max, b_sum = attend(
        b_acc, b_max, b_sum, b_q, p_keys, p_table, whole, end, b_positions, scale, num_heads // GROUP,
        HEAD_DIM, BLOCK_SIZE, BLOCK_N, True, True, PRECISION,
    )  # fmt: skip
    store_rows(out + o_rows, m_m, b_acc / b_sum[:, None], HEAD_DIM)
