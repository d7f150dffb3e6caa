"""What the products of quantized matrices share: how x is read, and how a tile of the output is put together.

Programs may share a tile by pieces of K (split-K). The last one to finish adds up the pieces, always in the same order,
so that results are the same from run to run.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from functools import cache

import torch
import triton
import triton.language as tl

# Tiles that are split are fewer than the programs that are wanted.
_MAX_TILES = 1024
_MAX_SPLITS = 8


@triton.jit
def load_rows(p_rows, o_k, o_m, M, K, IS_WHOLE: tl.constexpr):
    """Columns `o_k` of rows of x, `[BLOCK_M, BLOCK_K]`; `IS_WHOLE` says that all are below K.

    Pointers to rows beyond the last are to be those of the last. Few rows are better not read at all where they are
    beyond it: one row would be read 16 times.
    """
    BLOCK_M: tl.constexpr = o_m.shape[0]
    p_x = p_rows + o_k[None, :]
    if IS_WHOLE and BLOCK_M > 16:
        b_x = tl.load(p_x)
    elif IS_WHOLE:
        b_x = tl.load(p_x, mask=(o_m < M)[:, None], other=0.0)
    else:
        b_x = tl.load(p_x, mask=(o_m < M)[:, None] & (o_k < K)[None, :], other=0.0)
    return b_x


@triton.jit
def store_sum(b_out, out, parts, counters, i_tile, i_split, M, N, o_m, o_n, SPLITS: tl.constexpr):
    """Stores tile `[BLOCK_N, BLOCK_M]` of out `[M, N]`, or a piece of it in parts `[SPLITS, M, N]` float32."""
    m_out = (o_n < N)[:, None] & (o_m < M)[None, :]
    o_out = o_m[None, :].to(tl.int64) * N + o_n[:, None]
    if SPLITS == 1:
        tl.store(out + o_out, b_out.to(out.dtype.element_ty), mask=m_out)
    else:
        size = M.to(tl.int64) * N
        tl.store(parts + i_split * size + o_out, b_out, mask=m_out)
        # All of this program's threads have stored before the others are told.
        tl.debug_barrier()
        if tl.atomic_add(counters + i_tile, 1, sem="acq_rel") == SPLITS - 1:
            b_sum = tl.zeros_like(b_out)
            for i in tl.static_range(SPLITS):
                b_sum += tl.load(parts + i * size + o_out, mask=m_out, other=0.0)
            tl.store(out + o_out, b_sum.to(out.dtype.element_ty), mask=m_out)
            tl.store(counters + i_tile, 0)


def splits_for(num_tiles: int, num_wanted: int, most: int) -> int:
    """Into how many pieces to cut tiles, a power of two, so that there are `num_wanted` programs if 8 pieces do."""
    assert num_wanted <= _MAX_TILES, "each tile has a counter"
    splits = 1
    while num_tiles * splits < num_wanted and 2 * splits <= min(most, _MAX_SPLITS):
        splits *= 2
    return splits


@cache
def counters(device: torch.device) -> torch.Tensor:
    """How many pieces of each tile are done: zeros between products, which run one after the other.

    The first product must not be one that is captured as a CUDA graph, to which the memory would belong.
    """
    return torch.zeros(_MAX_TILES, dtype=torch.int32, device=device)


def parts_of(out: torch.Tensor, num_splits: int) -> torch.Tensor:
    """Room for the pieces of `out`."""
    if num_splits == 1:
        return out
    return torch.empty((num_splits, *out.shape), dtype=torch.float32, device=out.device)
