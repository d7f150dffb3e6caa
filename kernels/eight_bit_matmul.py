"""Products of numbers of eight bits, FP8 (E4M3) or int8, of a few rows; and of FP8 with a scale for each block.

The matrix stands on the left of the tensor cores' product, as in `int4_matmul.py`. For blocks, numbers of one block of
columns are multiplied; their sums are scaled and added up in float32 (DeepSeek-V3, Liu et al. 2024, arXiv 2412.19437,
section 3.3).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from mmserve.kernels.quantize_rows import quantize_rows
from mmserve.kernels.split_k import counters, load_rows, parts_of, splits_for, store_sum

# Columns that share a scale: of x, and of a matrix of blocks.
COLUMNS = 128


@dataclass(frozen=True)
class _Tiling:
    """Rows of the matrix and of x a program, columns at once, pieces of K, warps and stages."""

    block_n: int
    block_m: int
    block_k: int
    num_splits: int
    num_warps: int
    num_stages: int


def tiling(num_rows: int, n: int, k: int, *, has_blocks: bool) -> _Tiling:
    """For x of `num_rows`: few rows are bound by memory, and need all of the card's processors at work.

    The best of some twenty for each of 1 to 64 rows and the matrices of Llama-2-7B, on one H200.
    """
    if num_rows > 64:
        return _Tiling(128, 128, COLUMNS, 1, 8, 3)
    block_k, num_stages = (COLUMNS, 4) if has_blocks else (2 * COLUMNS, 3)
    splits = splits_for(triton.cdiv(n, 64), 192, triton.cdiv(k, block_k))
    return _Tiling(64, 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64, block_k, splits, 4, num_stages)


@triton.jit(do_not_specialize=["M", "BLOCKS_A_SPLIT"])
def _eight_bit_matmul_kernel(
    x,
    x_scales,
    numbers,
    scales,
    out,
    parts,
    counters,
    M,
    N,
    K,
    BLOCKS_A_SPLIT,
    ROWS_A_SCALE: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Scales of x are `[M]` and of the matrix `[N]`, or with `ROWS_A_SCALE` both by blocks of 128 columns."""
    num_m, num_blocks = tl.cdiv(M, BLOCK_M), tl.cdiv(K, BLOCK_K)
    i_n, i_m, i_split = tl.program_id(0) // num_m, tl.program_id(0) % num_m, tl.program_id(1)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o_k = tl.arange(0, BLOCK_K)
    # Rows beyond the last are computed as the last, and not stored.
    o_row, o_x = tl.minimum(o_n, N - 1), tl.minimum(o_m, M - 1)
    p_numbers = numbers + o_row[:, None].to(tl.int64) * K + o_k[None, :]
    p_x = x + o_x[:, None].to(tl.int64) * K
    first = i_split * BLOCKS_A_SPLIT
    IS_INT8: tl.constexpr = numbers.dtype.element_ty == tl.int8
    b_out = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.int32 if IS_INT8 else tl.float32)
    for i_block in range(first, tl.minimum(first + BLOCKS_A_SPLIT, num_blocks)):
        if IS_WHOLE:
            b_numbers = tl.load(p_numbers + i_block * BLOCK_K)
        else:
            b_numbers = tl.load(p_numbers + i_block * BLOCK_K, mask=(i_block * BLOCK_K + o_k < K)[None, :], other=0.0)
        b_x = load_rows(p_x, i_block * BLOCK_K + o_k, o_m, M, K, IS_WHOLE)
        if ROWS_A_SCALE is None:
            b_out = tl.dot(b_numbers, b_x.T, b_out, out_dtype=b_out.dtype)
        else:
            b_scale = tl.load(scales + i_n * BLOCK_N // ROWS_A_SCALE * num_blocks + i_block)
            b_out += tl.dot(b_numbers, b_x.T) * (tl.load(x_scales + o_x * num_blocks + i_block) * b_scale)[None, :]
    if ROWS_A_SCALE is None:
        b_sums = b_out.to(tl.float32) * tl.load(scales + o_row)[:, None] * tl.load(x_scales + o_x)[None, :]
    else:
        b_sums = b_out
    store_sum(b_sums, out, parts, counters, tl.program_id(0), i_split, M, N, o_m, o_n, SPLITS)


def eight_bit_matmul(
    x: torch.Tensor, x_scales: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """x `[M, K]` times a matrix `[N, K]`, both FP8 or both int8 -> `[M, N]` in `dtype`.

    Both are scaled by rows, by float32 `[M, 1]` and `[N]`. For a few rows; for many PyTorch's products are faster.
    """
    out = torch.empty((x.shape[0], numbers.shape[0]), dtype=dtype, device=x.device)
    return _multiply(x, x_scales, numbers, scales, out, None)


def fp8_block_matmul(x: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor, block_rows: int) -> torch.Tensor:
    """x `[M, K]` times a matrix `[N, K]` -> `[M, N]` in x's dtype.

    A weight is `numbers[n, k] * scales[n // block_rows, k // 128]`; x is quantized to 128 columns a scale. K is a
    multiple of 128, `block_rows` of 64.
    """
    num_rows, k = x.shape
    assert k % COLUMNS == 0, "blocks of columns are whole"
    assert block_rows % 64 == 0, "a program's rows share their scales"
    out = torch.empty((num_rows, numbers.shape[0]), dtype=x.dtype, device=x.device)
    x_numbers, x_scales = quantize_rows(x.reshape(-1, COLUMNS), torch.float8_e4m3fn)
    return _multiply(x_numbers.view(num_rows, k), x_scales, numbers, scales, out, block_rows)


def _multiply(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    numbers: torch.Tensor,
    scales: torch.Tensor,
    out: torch.Tensor,
    block_rows: int | None,
) -> torch.Tensor:
    assert x.is_contiguous(), "rows lie one after the other"
    assert numbers.is_contiguous(), "rows lie one after the other"
    (num_rows, k), n = x.shape, len(numbers)
    if not num_rows:
        return out
    chosen = tiling(num_rows, n, k, has_blocks=block_rows is not None)
    block_n = chosen.block_n if block_rows is None or block_rows % chosen.block_n == 0 else 64
    grid = (triton.cdiv(n, block_n) * triton.cdiv(num_rows, chosen.block_m), chosen.num_splits)
    _eight_bit_matmul_kernel[grid](
        x,
        x_scales,
        numbers,
        scales,
        out,
        parts_of(out, chosen.num_splits),
        counters(x.device),
        num_rows,
        n,
        k,
        triton.cdiv(triton.cdiv(k, chosen.block_k), chosen.num_splits),
        ROWS_A_SCALE=block_rows,
        IS_WHOLE=k % chosen.block_k == 0,
        BLOCK_N=block_n,
        BLOCK_M=chosen.block_m,
        BLOCK_K=chosen.block_k,
        SPLITS=chosen.num_splits,
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
    )
    return out
