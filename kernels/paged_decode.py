"""Attention of one query a sequence over its paged context, split over the keys (Flash-Decoding, Dao et al. 2023).

The query heads of one KV head share a program, so that K and V are read once. Blocks that all sequences begin with are
attended to with the queries of all at once, and each sequence goes on from there (cascade attention, Ye et al. 2024).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import functools
import math
from typing import NamedTuple

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
    split_range,
    store_rows,
)

# By bytes an element and padded head size. A program has num_stages - 1 tiles of K and V in flight in shared memory, so
# that (32, 2, 3) at 128 lets six be at work on a processor. On an H200 in bf16, against (64, 4, 3), which lets three:
# 256 contexts of 256 to 384 tokens 4.04 TB/s (3.93); one of 300 5.8 us (6.2), eight 11.5 us (15.9); 256 of 96 tokens
# behind 2048 shared ones 143 us (174).
DECODE_TILES = {
    (2, 16): Tiles(64, 4, 3),
    (2, 32): Tiles(64, 4, 3),
    (2, 64): Tiles(64, 4, 3),
    (2, 128): Tiles(32, 2, 3),
    (4, 16): Tiles(32, 4, 2),
    (4, 32): Tiles(32, 4, 2),
    (4, 64): Tiles(32, 4, 2),
    (4, 128): Tiles(32, 4, 2),
}
# For the blocks that all share: by bytes an element, and rows of queries a tile.
SHARED_TILES = {2: Tiles(64, 8, 3), 4: Tiles(32, 8, 2)}
SHARED_ROWS = 128
# Keys are split while there are fewer programs than this for a processor. On an H200 96 contexts of 2900 tokens take
# 136 us with 1 or 2, and 152 with 4.
PROGRAMS_PER_PROCESSOR = 2
MAX_SPLITS = 32
MAX_SHARED_SPLITS = 8
# Sequences times KV heads of which contexts can be split.
MAX_COUNTED = 1 << 16
# The rows of a tensor core's product; so many heads may share a KV head.
QUERY_ROWS = 16


def paged_attention_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    *,
    num_shared_blocks: torch.Tensor | None = None,
    max_context_len: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """One query a sequence, `[S, H, D]`, over the `context_lens` `[S]` of its `block_tables` `[S, max_blocks]`.

    A context of 0 gives zeros. The first `num_shared_blocks` `[1]` (maybe 0) of all tables are equal, and every context
    but an empty one is longer. No context exceeds `max_context_len`, which chooses the number of splits. On a device
    run it once before capturing it in a graph, and in one stream at a time: programs meet at counters they all share.
    """
    num_sequences, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_cache.shape[2:4]
    group, block_d = num_heads // num_kv_heads, padded_head_dim(head_dim)
    tiles, out = DECODE_TILES[q.element_size(), block_d], torch.empty_like(q) if out is None else out
    assert all(x.is_contiguous() for x in (q, kv_cache, context_lens, out)), "only tables may have a stride"
    assert block_tables.stride(1) == 1, "a table's blocks lie side by side"
    assert tiles.block_n % block_size == 0, "a tile of keys is made of whole blocks"
    most_splits = max_splits(num_sequences * num_kv_heads, num_processors(q.device))
    splits = min(most_splits, -(-max_context_len // tiles.block_n))
    # Of the context's length nothing is compiled anew: what may be split has the kernel for it.
    partial = _new_partial(splits, tiles.block_n, q) if most_splits > 1 else _Partial()
    shared = _Partial()
    if num_shared_blocks is not None:
        shared = _attend_shared(q, kv_cache, block_tables, num_shared_blocks, scale)
    _decode_kernel[(num_sequences, num_kv_heads, splits)](
        out,
        q,
        kv_cache,
        block_tables,
        block_tables.stride(0),
        context_lens,
        scale * math.log2(math.e),
        partial.values,
        partial.lse,
        _arrivals(q.device) if most_splits > 1 else None,
        num_shared_blocks,
        shared.values,
        shared.lse,
        shared.num_splits,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        GROUP=group,
        BLOCK_N=tiles.block_n,
        BLOCK_G=QUERY_ROWS,
        BLOCK_D=block_d,
        SPLITS=MAX_SPLITS,
        SHARED_BLOCK_N=shared.block_n,
        PRECISION=dot_precision(q.dtype),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return out


def max_splits(num_rows: int, num_processors: int) -> int:
    """Into how many parts contexts are cut at most, for so many rows (a sequence and KV head each)."""
    if num_rows > MAX_COUNTED:
        return 1
    return min(-(-PROGRAMS_PER_PROCESSOR * num_processors // num_rows), MAX_SPLITS)


def num_shared_splits(num_tiles: int, num_kv_heads: int, num_processors: int) -> int:
    """Into how many parts the shared blocks are cut: no more than fill the processors."""
    return max(1, min(num_processors // (num_tiles * num_kv_heads), MAX_SHARED_SPLITS))


@functools.cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; another has as many as a test needs to see splits."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 4


class _Partial(NamedTuple):
    """What splits leave: normalised values `[splits, S, H, D]`, and log2 of each one's sum of powers of two."""

    values: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    num_splits: int = 1
    block_n: int = 0


def _new_partial(num_splits: int, block_n: int, q: torch.Tensor) -> _Partial:
    values = torch.empty((num_splits, *q.shape), dtype=torch.float32, device=q.device)
    return _Partial(values, torch.empty(values.shape[:-1], dtype=torch.float32, device=q.device), num_splits, block_n)


@functools.cache
def _arrivals(device: torch.device) -> torch.Tensor:
    """Zeros, one a sequence and KV head: its splits count themselves in, and the last one puts back the zero."""
    return torch.zeros(MAX_COUNTED, dtype=torch.int32, device=device)


def _attend_shared(
    q: torch.Tensor, kv_cache: torch.Tensor, block_tables: torch.Tensor, num_shared_blocks: torch.Tensor, scale: float
) -> _Partial:
    """All queries over the blocks that all tables begin with."""
    num_sequences, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_cache.shape[2:4]
    num_rows = num_sequences * (num_heads // num_kv_heads)
    tiles, num_tiles = SHARED_TILES[q.element_size()], -(-num_rows // SHARED_ROWS)
    splits = num_shared_splits(num_tiles, num_kv_heads, num_processors(q.device))
    partial = _new_partial(splits, tiles.block_n, q)
    _shared_kernel[(num_tiles, num_kv_heads, splits)](
        partial.values,
        partial.lse,
        q,
        kv_cache,
        block_tables,
        num_shared_blocks,
        scale * math.log2(math.e),
        num_rows,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        GROUP=num_heads // num_kv_heads,
        BLOCK_M=SHARED_ROWS,
        BLOCK_N=tiles.block_n,
        BLOCK_D=padded_head_dim(head_dim),
        PRECISION=dot_precision(q.dtype),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return partial


# The engine cuts these out of a step's tensors, anywhere: their alignment must not compile anything anew.
_CUT_ANYWHERE = ["block_tables", "context_lens", "num_shared_blocks"]


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=_CUT_ANYWHERE)
def _shared_kernel(
    partial_values,
    partial_lse,
    q,
    kv_cache,
    block_tables,
    num_shared_blocks,
    scale,
    num_rows,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: a tile of rows (a sequence's query head each), a KV head, a split of the shared blocks' keys."""
    i_kv, i_split, num_kv_heads = tl.program_id(1), tl.program_id(2), tl.num_programs(1)
    shared_len = tl.load(num_shared_blocks) * BLOCK_SIZE
    first, end, num_active = split_range(0, shared_len, i_split, tl.num_programs(2), BLOCK_N)
    if i_split >= num_active:
        return
    o_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_m = o_m < num_rows
    o_heads = (o_m // GROUP * num_kv_heads + i_kv) * GROUP + o_m % GROUP
    b_q = load_rows(q + o_heads * HEAD_DIM, m_m, HEAD_DIM, BLOCK_D, True)
    p_keys = kv_cache + i_kv * (BLOCK_SIZE * HEAD_DIM)
    whole = first + (end - first) // BLOCK_N * BLOCK_N
    b_acc, b_max, b_sum = empty_softmax(BLOCK_M, BLOCK_D)
    b_acc, b_max, b_sum = attend(
        b_acc, b_max, b_sum, b_q, p_keys, block_tables, first, whole, o_m, scale, num_kv_heads,
        HEAD_DIM, BLOCK_SIZE, BLOCK_N, False, False, PRECISION,
    )  # fmt: skip
    b_acc, b_max, b_sum = attend(
        b_acc, b_max, b_sum, b_q, p_keys, block_tables, whole, end, o_m, scale, num_kv_heads,
        HEAD_DIM, BLOCK_SIZE, BLOCK_N, True, False, PRECISION,
    )  # fmt: skip
    o_partial = i_split * (num_rows * num_kv_heads) + o_heads
    store_rows(partial_values + o_partial * HEAD_DIM, m_m, b_acc / b_sum[:, None], HEAD_DIM)
    tl.store(partial_lse + o_partial, b_max + tl.log2(b_sum), mask=m_m)


@triton.jit(do_not_specialize=["table_stride", "num_shared_splits"], do_not_specialize_on_alignment=_CUT_ANYWHERE)
def _decode_kernel(
    out, q, kv_cache, block_tables, table_stride, context_lens, scale, partial_values, partial_lse, arrivals,
    num_shared_blocks, shared_values, shared_lse, num_shared_splits,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr, SHARED_BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: a sequence, a KV head with its GROUP query heads, a split of the keys."""
    # Neighbours in the grid are sequences: those that read the same blocks do so at a time, and meet in L2.
    i_seq, i_kv, i_split, num_kv_heads = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(1)
    context_len = tl.load(context_lens + i_seq)
    shared_len = 0
    if num_shared_blocks is not None:
        shared_len = tl.load(num_shared_blocks) * BLOCK_SIZE
    first, end, num_active = split_range(shared_len, context_len, i_split, tl.num_programs(2), BLOCK_N)
    o_g = tl.arange(0, BLOCK_G)
    m_g = o_g < GROUP
    i_counter = i_seq * num_kv_heads + i_kv
    o_heads = i_counter * GROUP + o_g
    b_acc, b_max, b_sum = empty_softmax(BLOCK_G, BLOCK_D)
    if i_split >= num_active:
        if i_split == 0:
            store_rows(out + o_heads * HEAD_DIM, m_g, b_acc, HEAD_DIM)
        return
    if num_shared_blocks is not None:
        b_acc, b_max, b_sum = _shared_part(
            b_acc, b_max, b_sum, shared_values, shared_lse, o_heads, m_g, i_split, shared_len, num_shared_splits,
            tl.num_programs(0) * num_kv_heads * GROUP, HEAD_DIM, SHARED_BLOCK_N,
        )  # fmt: skip
    b_q = load_rows(q + o_heads * HEAD_DIM, m_g, HEAD_DIM, BLOCK_D, True)
    p_table = block_tables + i_seq.to(tl.int64) * table_stride
    b_acc, b_max, b_sum = attend(
        b_acc, b_max, b_sum, b_q, kv_cache + i_kv * (BLOCK_SIZE * HEAD_DIM), p_table, first, end, o_g, scale,
        num_kv_heads, HEAD_DIM, BLOCK_SIZE, BLOCK_N, True, False, PRECISION,
    )  # fmt: skip
    b_values = b_acc / b_sum[:, None]
    if partial_values is None:
        store_rows(out + o_heads * HEAD_DIM, m_g, b_values, HEAD_DIM)
    else:
        _store_split(
            out, partial_values, partial_lse, arrivals + i_counter, b_values, b_max + tl.log2(b_sum), i_counter * GROUP,
            i_split, tl.num_programs(0) * num_kv_heads * GROUP, num_active, HEAD_DIM, GROUP, SPLITS,
        )  # fmt: skip


@triton.jit
def _store_split(
    out, partial_values, partial_lse, p_arrived, b_values, b_lse, first_head, i_split, num_heads, num_active,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """The whole of it goes out; of several splits each leaves its own part, and the last to arrive merges them."""
    o_g = tl.arange(0, b_values.shape[0])
    m_g = o_g < GROUP
    if num_active == 1:
        store_rows(out + (first_head + o_g) * HEAD_DIM, m_g, b_values, HEAD_DIM)
    else:
        o_rows = i_split * num_heads + first_head + o_g
        store_rows(partial_values + o_rows * HEAD_DIM, m_g, b_values, HEAD_DIM)
        tl.store(partial_lse + o_rows, b_lse, mask=m_g)
        # The barrier puts the stores of all threads before the count, which one thread releases for all.
        tl.debug_barrier()
        if tl.atomic_add(p_arrived, 1, sem="acq_rel") == num_active - 1:
            tl.store(p_arrived, 0)
            _merge(out, partial_values, partial_lse, first_head, num_heads, num_active,
                   HEAD_DIM, GROUP, SPLITS, b_values.shape[1])  # fmt: skip


@triton.jit
def _shared_part(
    b_acc, b_max, b_sum, shared_values, shared_lse, o_heads, m_g, i_split, shared_len, num_splits, num_heads,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The softmax that the first split goes on with; the others begin with an empty one."""
    num_active = split_range(0, shared_len, 0, num_splits, BLOCK_N)[2]
    for i_shared in range(tl.where(i_split == 0, num_active, 0)):
        o_rows = i_shared * num_heads + o_heads
        b_lse = tl.load(shared_lse + o_rows, mask=m_g, other=0.0)
        b_values = load_rows(shared_values + o_rows * HEAD_DIM, m_g, HEAD_DIM, b_acc.shape[1], True)
        b_new_max = tl.maximum(b_max, b_lse)
        b_decay, b_weight = tl.exp2(b_max - b_new_max), tl.exp2(b_lse - b_new_max)
        b_acc = b_acc * b_decay[:, None] + b_values * b_weight[:, None]
        b_sum = b_sum * b_decay + b_weight
        b_max = b_new_max
    return b_acc, b_max, b_sum


@triton.jit
def _merge(
    out, partial_values, partial_lse, first_head, num_heads, num_active,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Weigh the splits of each of a group's heads by their sums. Past L1, which knows nothing of other processors."""
    o_s, o_d = tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
    m_s, m_d = o_s < num_active, o_d < HEAD_DIM
    for i_head in tl.static_range(GROUP):
        o_rows = o_s * num_heads + first_head + i_head
        b_lse = tl.load(partial_lse + o_rows, mask=m_s, other=float("-inf"), cache_modifier=".cg")
        b_weight = tl.exp2(b_lse - tl.max(b_lse, 0))
        p_values = partial_values + o_rows[:, None] * HEAD_DIM + o_d[None, :]
        b_values = tl.load(p_values, mask=m_s[:, None] & m_d[None, :], other=0.0, cache_modifier=".cg")
        b_out = tl.sum(b_values * b_weight[:, None], 0) / tl.sum(b_weight, 0)
        tl.store(out + (first_head + i_head) * HEAD_DIM + o_d, b_out.to(out.dtype.element_ty), mask=m_d)
