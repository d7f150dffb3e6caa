"""Products with a matrix of four bits a number, and the unpacking of one.

A tile is 128 columns of one row: 16 words, and nibble j of word w is column `16 * j + w`. So each nibble of the words,
taken alone, is a piece of the row in order, and needs no shuffling. The matrix stands on the left of the tensor cores'
product, where operands may come from registers (the idea of Marlin, Frantar et al. 2024, arXiv 2408.11743): numbers go
from words to the product without a detour through shared memory.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

TILE_COLUMNS = 128
TILE_WORDS = 16
_NIBBLES = 8
# What numbers are counted from, so that most offsets vanish and bfloat16 sums stay small.
MIDDLE = 8
# Rows of the matrix a program, and tiles at once, of the kernel for one row.
ROW_BLOCK, ROW_TILES = 16, 4


def tile_int4(numbers: torch.Tensor) -> torch.Tensor:
    """uint8 `[N, K]` below 16 -> int32 `[ceil(K / 128), N, 16]`; columns beyond K are MIDDLE."""
    padded = F.pad(numbers, (0, -numbers.shape[1] % TILE_COLUMNS), value=MIDDLE).to(torch.int64)
    tiles = padded.view(numbers.shape[0], -1, _NIBBLES, TILE_WORDS)
    shifts = (4 * torch.arange(_NIBBLES, device=numbers.device))[:, None]
    words = (tiles << shifts).sum(dim=2).transpose(0, 1).contiguous()
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


@dataclass(frozen=True)
class _Tiling:
    """Rows of the matrix and of x a program, pieces of K, warps and stages."""

    block_n: int
    block_m: int
    num_splits: int
    num_warps: int
    num_stages: int


def tiling(num_rows: int, n: int, k: int) -> _Tiling:
    """For x of `num_rows`: few rows are bound by memory, and need all of the card's processors at work."""
    num_tiles = triton.cdiv(k, TILE_COLUMNS)
    if num_rows <= 64:
        block_m = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
        splits = max(1, min(num_tiles // 4, 528 // max(triton.cdiv(n, 64), 1)))
        return _Tiling(64, block_m, splits, 4, 4)
    return _Tiling(128, 128, 1, 8, 3)


@triton.jit
def _numbers(b_words, J: tl.constexpr, DTYPE: tl.constexpr):
    """Nibble J of words as numbers from -8 to 7.

    They become the last bits of the mantissa of a power of two, which needs no conversion.
    """
    b_nibbles = (b_words >> (4 * J)) & 0xF
    if DTYPE == tl.bfloat16:  # noqa: SIM300
        b_numbers = (b_nibbles | 0x4300).to(tl.uint16).to(tl.bfloat16, bitcast=True) - 136.0
    elif DTYPE == tl.float16:  # noqa: SIM300
        b_numbers = (b_nibbles | 0x6400).to(tl.uint16).to(tl.float16, bitcast=True) - 1032.0
    else:
        b_numbers = (b_nibbles | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0
    return b_numbers


@triton.jit(do_not_specialize=["M"])
def _int4_matmul_kernel(
    x,
    words,
    scales,
    offsets,
    sums,
    out,
    M,
    N,
    K,
    x_stride,
    TILES_A_SPLIT,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """out `[splits, M, N]` float32 or, of one split, in x's dtype."""
    # Programs side by side share rows of the matrix.
    num_m = tl.cdiv(M, BLOCK_M)
    i_n, i_m, i_split = tl.program_id(0) // num_m, tl.program_id(0) % num_m, tl.program_id(1)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o_words = tl.arange(0, 16)
    m_n, m_m = o_n < N, o_m < M
    first = i_split * TILES_A_SPLIT
    last = tl.minimum(first + TILES_A_SPLIT, tl.cdiv(K, 128))
    p_x = x + o_m[None, :].to(tl.int64) * x_stride + o_words[:, None]
    b_out = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for i_tile in range(first, last):
        p_words = words + (i_tile * N + o_n[:, None]) * 16 + o_words[None, :]
        b_words = tl.load(p_words, mask=m_n[:, None], other=0)
        b_group = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
        for j in tl.static_range(8):
            o_k = i_tile * 128 + j * 16 + o_words
            # [16, BLOCK_M]
            b_x = tl.load(p_x + i_tile * 128 + j * 16, mask=(o_k < K)[:, None] & m_m[None, :], other=0.0)
            b_group = tl.dot(_numbers(b_words, j, x.dtype.element_ty), b_x, b_group, input_precision="ieee")
            if (j + 1) * 16 % GROUP == 0 or j == 7:
                i_group = (i_tile * 128 + j * 16) // GROUP
                # The last tile may reach beyond the last group.
                m_group = m_n & (i_tile * 128 + j * 16 // GROUP * GROUP < K)
                b_scale = tl.load(scales + i_group * N + o_n, mask=m_group, other=0.0).to(tl.float32)
                b_out += b_group * b_scale[:, None]
                b_group = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
                # A group of several tiles has one offset, counted with its last tile.
                if offsets is not None:
                    ends = ((i_tile * 128 + j * 16 + 16) % GROUP == 0) | (i_tile * 128 + j * 16 + 16 >= K)
                    m_offset = m_group & ends
                    b_offset = tl.load(offsets + i_group * N + o_n, mask=m_offset, other=0.0).to(tl.float32)
                    m_sum = m_m & ends & (i_tile * 128 + j * 16 // GROUP * GROUP < K)
                    b_sum = tl.load(sums + i_group * M + o_m, mask=m_sum, other=0.0)
                    b_out += b_offset[:, None] * b_sum[None, :]
    p_out = out + (i_split.to(tl.int64) * M + o_m[None, :]) * N + o_n[:, None]
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_n[:, None] & m_m[None, :])


@triton.jit
def _int4_row_kernel(
    x, words, scales, offsets, out, N, K, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr
):
    """One row of x. Each thread keeps sums of its own words, which are added up at the end; `[N]` in x's dtype."""
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # A row of two axes from the start, so that it meets the words without changing its layout.
    o_words = tl.arange(0, TILES * 16)[None, :]
    m_n = (o_n < N)[:, None]
    b_out = tl.zeros([BLOCK_N, TILES * 16], dtype=tl.float32)
    for i_first in range(0, tl.cdiv(K, 128), TILES):
        o_tiles = i_first + o_words // 16
        p_words = words + (o_tiles * N + o_n[:, None]) * 16 + o_words % 16
        b_words = tl.load(p_words, mask=m_n & (o_tiles * 128 < K), other=0)
        b_group = tl.zeros([BLOCK_N, TILES * 16], dtype=tl.float32)
        b_sum = tl.zeros([1, TILES * 16], dtype=tl.float32)
        for j in tl.static_range(8):
            o_k = o_tiles * 128 + j * 16 + o_words % 16
            b_x = tl.load(x + o_k, mask=o_k < K, other=0.0).to(tl.float32)
            b_group += _numbers(b_words, j, tl.float32) * b_x
            b_sum += b_x
            if (j + 1) * 16 % GROUP == 0 or j == 7:
                m_groups = m_n & (o_tiles * 128 + j * 16 // GROUP * GROUP < K)
                p_scales = (o_tiles * 128 + j * 16) // GROUP * N + o_n[:, None]
                b_out += b_group * tl.load(scales + p_scales, mask=m_groups, other=0.0).to(tl.float32)
                if offsets is not None:
                    b_out += tl.load(offsets + p_scales, mask=m_groups, other=0.0).to(tl.float32) * b_sum
                b_group = tl.zeros([BLOCK_N, TILES * 16], dtype=tl.float32)
                b_sum = tl.zeros([1, TILES * 16], dtype=tl.float32)
    tl.store(out + o_n, tl.sum(b_out, axis=1).to(out.dtype.element_ty), mask=o_n < N)


@triton.jit(do_not_specialize=["M"])
def _group_sums_kernel(x, sums, M, K, x_stride, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """`[groups, M]` float32: the sum of each group of columns of each row."""
    i_row, i_group = tl.program_id(0), tl.program_id(1)
    o_columns = tl.arange(0, BLOCK)
    m_columns = (o_columns < GROUP) & (i_group * GROUP + o_columns < K)
    p_x = x + i_row.to(tl.int64) * x_stride + i_group * GROUP + o_columns
    b_x = tl.load(p_x, mask=m_columns, other=0.0).to(tl.float32)
    tl.store(sums + i_group * M + i_row, tl.sum(b_x, axis=0))


@triton.jit
def _sum_kernel(parts, out, SIZE, SPLITS, BLOCK: tl.constexpr):
    o_values = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_values = o_values < SIZE
    b_sum = tl.zeros([BLOCK], dtype=tl.float32)
    for i_split in range(SPLITS):
        b_sum += tl.load(parts + i_split * SIZE + o_values, mask=m_values, other=0.0)
    tl.store(out + o_values, b_sum.to(out.dtype.element_ty), mask=m_values)


@triton.jit
def _dequantize_kernel(words, scales, offsets, out, N, K, GROUP: tl.constexpr, BLOCK_N: tl.constexpr):
    i_tile = tl.program_id(1)
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_words = tl.arange(0, 16)
    m_n = o_n < N
    p_words = words + (i_tile * N + o_n[:, None]) * 16 + o_words[None, :]
    b_words = tl.load(p_words, mask=m_n[:, None], other=0)
    for j in tl.static_range(8):
        o_k = i_tile * 128 + j * 16 + o_words
        i_group = (i_tile * 128 + j * 16) // GROUP
        m_group = m_n & (i_tile * 128 + j * 16 < K)
        b_weight = _numbers(b_words, j, tl.float32)
        b_weight *= tl.load(scales + i_group * N + o_n, mask=m_group, other=0.0).to(tl.float32)[:, None]
        if offsets is not None:
            b_weight += tl.load(offsets + i_group * N + o_n, mask=m_group, other=0.0).to(tl.float32)[:, None]
        p_out = out + o_n[:, None].to(tl.int64) * K + o_k[None, :]
        tl.store(p_out, b_weight.to(out.dtype.element_ty), mask=m_n[:, None] & (o_k < K)[None, :])


def int4_matmul(
    x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None, group_size: int
) -> torch.Tensor:
    """x `[M, K]` times a matrix `[N, K]` -> `[M, N]` in x's dtype, summed in float32.

    `words` are `tile_int4` of its numbers; a weight is `(number - 8) * scale + offset`, with `scales` and `offsets`
    `[K / group_size, N]`. Groups are of 16, 32 or 64 columns, or of a multiple of 128.
    """
    num_rows, k = x.shape
    n = words.shape[1]
    assert x.stride(1) == 1, "the values of a row lie side by side"
    assert group_size % TILE_COLUMNS == 0 or group_size in (16, 32, 64), group_size
    out = torch.empty((num_rows, n), dtype=x.dtype, device=x.device)
    if num_rows == 1:
        _int4_row_kernel[(triton.cdiv(n, ROW_BLOCK),)](
            x, words, scales, offsets, out, n, k, GROUP=group_size, BLOCK_N=ROW_BLOCK, TILES=ROW_TILES, num_warps=4
        )
    elif num_rows:
        _matmul(x, words, scales, offsets, out, group_size)
    return out


def _matmul(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
    out: torch.Tensor,
    group_size: int,
) -> None:
    (num_rows, k), n = x.shape, words.shape[1]
    chosen = tiling(num_rows, n, k)
    is_split = chosen.num_splits > 1
    parts = torch.empty((chosen.num_splits, num_rows, n), dtype=torch.float32, device=x.device) if is_split else out
    sums = None
    if offsets is not None:
        sums = torch.empty((scales.shape[0], num_rows), dtype=torch.float32, device=x.device)
        block = triton.next_power_of_2(group_size)
        _group_sums_kernel[(num_rows, scales.shape[0])](
            x, sums, num_rows, k, x.stride(0), GROUP=group_size, BLOCK=block, num_warps=1
        )
    grid = (triton.cdiv(n, chosen.block_n) * triton.cdiv(num_rows, chosen.block_m), chosen.num_splits)
    _int4_matmul_kernel[grid](
        x,
        words,
        scales,
        offsets,
        sums,
        parts,
        num_rows,
        n,
        k,
        x.stride(0),
        triton.cdiv(triton.cdiv(k, TILE_COLUMNS), chosen.num_splits),
        GROUP=group_size,
        BLOCK_N=chosen.block_n,
        BLOCK_M=chosen.block_m,
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
    )
    if is_split:
        sum_of_splits(parts, out)


def sum_of_splits(parts: torch.Tensor, out: torch.Tensor) -> None:
    """parts float32 `[splits, ...]` -> out `[...]`."""
    _sum_kernel[(triton.cdiv(out.numel(), 1024),)](parts, out, out.numel(), len(parts), BLOCK=1024)


def dequantize_int4(
    words: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
    group_size: int,
    num_columns: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The matrix `[N, K]` of `int4_matmul` in `dtype`."""
    num_tiles, n, _ = words.shape
    out = torch.empty((n, num_columns), dtype=dtype, device=words.device)
    _dequantize_kernel[(triton.cdiv(n, 64), num_tiles)](
        words,
        scales,
        offsets,
        out,
        n,
        num_columns,
        GROUP=group_size,
        BLOCK_N=64,
    )
    return out
