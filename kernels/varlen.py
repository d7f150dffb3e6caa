"""Attention of a packed batch in which every sequence, an image or a window of one, sees all of itself.

The softmax is computed while the keys pass by (Milakov and Gimelshein 2018; Dao et al. 2022, FlashAttention).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

# Query rows a program: windows fill the small tile, whole images need the large one to read their keys less often.
WINDOW_TILE = 64
IMAGE_TILE = 128
_LOG2_E = 1.4426950408889634


def query_tile(lengths: Sequence[int]) -> int:
    """The rows of a tile that suit sequences of `lengths`."""
    return WINDOW_TILE if max(lengths, default=0) <= WINDOW_TILE else IMAGE_TILE


def query_tiles(lengths: Sequence[int], query_tile: int) -> torch.Tensor:
    """Rows (sequence, first row inside the sequence), int32 `[N, 2]` on the CPU; longest sequences first."""
    by_length = torch.tensor(lengths, dtype=torch.int64)
    by_length, sequences = by_length.sort(descending=True, stable=True)
    counts = (by_length + query_tile - 1) // query_tile
    numbers = torch.arange(int(counts.sum())) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    tiles = torch.stack((torch.repeat_interleave(sequences, counts), numbers * query_tile), dim=1)
    return tiles.to(torch.int32)


@triton.jit
def _load_rows(p_head, o_rows, length, row_stride, DIM: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """One head's rows, `[rows, BLOCK]`; zeros from row `length` and from column DIM on."""
    o_dims = tl.arange(0, BLOCK)
    p_rows = p_head + o_rows[:, None] * row_stride + o_dims[None, :]
    if MASKED or BLOCK > DIM:
        return tl.load(p_rows, mask=(o_rows < length)[:, None] & (o_dims < DIM)[None, :], other=0.0)
    return tl.load(p_rows)


@triton.jit
def _attend(
    state,
    b_q,
    p_k,
    p_v,
    i_key,
    length,
    k_stride,
    v_stride,
    scale,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The state of the softmax after KEYS more keys: sums of values, of weights, and the greatest score, base 2."""
    b_out, b_sum, b_max = state
    o_keys = i_key + tl.arange(0, KEYS)
    b_k = _load_rows(p_k, o_keys, length, k_stride, DIM, BLOCK, MASKED)
    b_scores = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
    if MASKED:
        b_scores = tl.where((o_keys < length)[None, :], b_scores, float("-inf"))
    b_new_max = tl.maximum(b_max, tl.max(b_scores, axis=1) * scale)
    b_weights = tl.exp2(b_scores * scale - b_new_max[:, None])
    b_decay = tl.exp2(b_max - b_new_max)
    b_sum = b_sum * b_decay + tl.sum(b_weights, axis=1)
    b_v = _load_rows(p_v, o_keys, length, v_stride, DIM, BLOCK, MASKED)
    b_out = tl.dot(b_weights.to(b_v.dtype), b_v, b_out * b_decay[:, None], input_precision="ieee")
    return b_out, b_sum, b_new_max


@triton.jit(do_not_specialize=["num_tiles"])
def _varlen_kernel(
    q,
    k,
    v,
    out,
    starts,
    tiles,
    num_tiles,
    q_stride,
    k_stride,
    v_stride,
    scale,
    HEADS: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """One tile of queries of one head. `scale` is the one of the scores times log2(e)."""
    if HEADS_FIRST:
        i_tile, i_head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    else:
        i_tile, i_head = tl.program_id(0) % num_tiles, tl.program_id(0) // num_tiles
    i_sequence = tl.load(tiles + i_tile * 2)
    i_start = tl.load(starts + i_sequence).to(tl.int64)
    length = (tl.load(starts + i_sequence + 1) - i_start).to(tl.int32)
    o_rows = tl.load(tiles + i_tile * 2 + 1) + tl.arange(0, ROWS)
    p_k = k + i_start * k_stride + i_head * DIM
    p_v = v + i_start * v_stride + i_head * DIM
    b_q = _load_rows(q + i_start * q_stride + i_head * DIM, o_rows, length, q_stride, DIM, BLOCK, True)
    b_out = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    state = (b_out, tl.zeros([ROWS], dtype=tl.float32), tl.full([ROWS], float("-inf"), dtype=tl.float32))
    full = length // KEYS * KEYS
    for i_key in range(0, full, KEYS):
        state = _attend(state, b_q, p_k, p_v, i_key, length, k_stride, v_stride, scale, DIM, BLOCK, KEYS, False)
    if full < length:
        state = _attend(state, b_q, p_k, p_v, full, length, k_stride, v_stride, scale, DIM, BLOCK, KEYS, True)
    b_out, b_sum, _ = state
    o_dims = tl.arange(0, BLOCK)
    p_out = out + i_start * (HEADS * DIM) + i_head * DIM + o_rows[:, None] * (HEADS * DIM) + o_dims[None, :]
    m_out = (o_rows < length)[:, None] & (o_dims < DIM)[None, :]
    tl.store(p_out, (b_out / b_sum[:, None]).to(out.dtype.element_ty), mask=m_out)


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    tiles: torch.Tensor,
    scale: float,
    *,
    query_tile: int,
) -> torch.Tensor:
    """q, k, v `[T, H, D]`, heads side by side in a token's row, tokens anywhere -> contiguous `[T, H, D]`.

    `starts` int32 `[S + 1]` bounds the sequences; `tiles` are `query_tiles` of their lengths for `query_tile` rows.
    """
    num_heads, head_dim = q.shape[1:]
    for x in (q, k, v):
        assert x.stride(2) == 1, "the values of a head lie side by side"
        assert x.stride(1) == head_dim or num_heads == 1, "the heads of a token lie side by side"
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    num_tiles = tiles.shape[0]
    if num_tiles == 0:
        return out
    in_windows = query_tile == WINDOW_TILE
    _varlen_kernel[(num_tiles * num_heads,)](
        q,
        k,
        v,
        out,
        starts,
        tiles,
        num_tiles,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        scale * _LOG2_E,
        HEADS=num_heads,
        # Windows: the heads of a token share lines of memory. Images: the programs at work share one head's keys in L2.
        HEADS_FIRST=in_windows,
        DIM=head_dim,
        BLOCK=max(triton.next_power_of_2(head_dim), 16),
        ROWS=query_tile,
        # Float32, for tests, has no tensor cores: larger blocks would spill registers.
        KEYS=16 if q.dtype == torch.float32 else 64,
        num_warps=4 if in_windows else 8,
        num_stages=1 if q.dtype == torch.float32 else 2 if in_windows else 3,
    )
    return out
