"""What the kernels over a paged cache share: tiles of keys found through a block table, and the running softmax.

Names: `i_` index, `o_` offsets, `m_` mask, `p_` pointer, `b_` block of values. M rows of queries, N keys, D head size.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from typing import NamedTuple

import torch
import triton
import triton.language as tl

# Every tile of keys is a multiple of it.
MAX_BLOCK_SIZE = 32
# There are no tiles for larger heads.
MAX_HEAD_DIM = 128


class Tiles(NamedTuple):
    """Keys a tile (a multiple of the block size), warps a program, and tiles of K and V in flight plus one."""

    block_n: int
    num_warps: int
    num_stages: int


def can_tile(block_size: int) -> bool:
    """Whether whole blocks of so many tokens fill every tile of keys."""
    return block_size >= 1 and MAX_BLOCK_SIZE % block_size == 0


def padded_head_dim(head_dim: int) -> int:
    """The power of two that a tile's last axis has; a dot wants 16 at least."""
    return max(16, 1 << (head_dim - 1).bit_length())


def dot_precision(dtype: torch.dtype) -> str:
    """Products of float32 stay float32; for halves it says nothing."""
    return "ieee" if dtype == torch.float32 else "tf32"


@triton.jit
def split_range(first, end, i_split, num_splits, BLOCK_N: tl.constexpr):
    """The keys of split i among `first .. end`, in whole tiles; and how many splits have any."""
    num_tiles = tl.cdiv(tl.maximum(end - first, 0), BLOCK_N)
    tiles_per_split = tl.maximum(tl.cdiv(num_tiles, num_splits), 1)
    split_first = first + i_split * tiles_per_split * BLOCK_N
    split_end = tl.minimum(split_first + tiles_per_split * BLOCK_N, end)
    return split_first, split_end, tl.cdiv(num_tiles, tiles_per_split)


@triton.jit
def empty_softmax(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Nothing attended to yet: values `[M, D]`, the largest score and the sum `[M]`."""
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    b_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    return b_acc, b_max, tl.zeros([BLOCK_M], dtype=tl.float32)


@triton.jit
def load_rows(p_rows, m_rows, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """`[rows, D]` at the row pointers; zeros where a row is masked, and in the padding of D."""
    o_d = tl.arange(0, BLOCK_D)
    p_values = p_rows[:, None] + o_d[None, :]
    if MASKED and HEAD_DIM != BLOCK_D:
        b_values = tl.load(p_values, mask=m_rows[:, None] & (o_d < HEAD_DIM)[None, :], other=0.0)
    elif MASKED:
        b_values = tl.load(p_values, mask=m_rows[:, None], other=0.0)
    elif HEAD_DIM != BLOCK_D:
        b_values = tl.load(p_values, mask=(o_d < HEAD_DIM)[None, :], other=0.0)
    else:
        b_values = tl.load(p_values)
    return b_values


@triton.jit
def store_rows(p_rows, m_rows, b_values, HEAD_DIM: tl.constexpr):
    """`[rows, D]` to the row pointers, but for masked rows and the padding of D."""
    o_d = tl.arange(0, b_values.shape[1])
    p_values = p_rows[:, None] + o_d[None, :]
    tl.store(p_values, b_values.to(p_values.dtype.element_ty), mask=m_rows[:, None] & (o_d < HEAD_DIM)[None, :])


@triton.jit
def attend(
    b_acc,
    b_max,
    b_sum,
    b_q,
    p_keys,
    p_table,
    first,
    end,
    b_positions,
    scale,
    num_kv_heads,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Go on with the softmax over keys `first .. end` (first: a block's start; unmasked: whole tiles only).

    p_keys: the head's keys in block 0, in q's precision or in FP8. scale: that of the scores times log2(e), for softmax
    by powers of 2 (Dao 2023).
    """
    BLOCK_D: tl.constexpr = b_q.shape[1]
    o_n = tl.arange(0, BLOCK_N)
    v_offset = num_kv_heads * (BLOCK_SIZE * HEAD_DIM)
    p_ids = p_table + o_n // BLOCK_SIZE
    b_ids = tl.load(p_ids + first // BLOCK_SIZE, mask=first + o_n < end, other=0)
    for start in range(first, end, BLOCK_N):
        m_n = start + o_n < end
        p_k = p_keys + (b_ids.to(tl.int64) * (2 * v_offset) + (o_n % BLOCK_SIZE) * HEAD_DIM)
        # A tile's own ids are there already: the loads of K and V need not wait for the table.
        following = start + BLOCK_N
        b_ids = tl.load(p_ids + following // BLOCK_SIZE, mask=following + o_n < end, other=0)
        b_k = load_rows(p_k, m_n, HEAD_DIM, BLOCK_D, MASKED).to(b_q.dtype)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        if CAUSAL:
            b_s = tl.where(m_n[None, :] & (start + o_n[None, :] <= b_positions[:, None]), b_s, float("-inf"))
        elif MASKED:
            b_s = tl.where(m_n[None, :], b_s, float("-inf"))
        b_new_max = tl.maximum(b_max, tl.max(b_s, 1) * scale)
        b_p = tl.exp2(b_s * scale - b_new_max[:, None])
        b_decay = tl.exp2(b_max - b_new_max)
        b_sum = b_sum * b_decay + tl.sum(b_p, 1)
        b_v = load_rows(p_k + v_offset, m_n, HEAD_DIM, BLOCK_D, MASKED).to(b_q.dtype)
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_decay[:, None], input_precision=PRECISION)
        b_max = b_new_max
    return b_acc, b_max, b_sum
