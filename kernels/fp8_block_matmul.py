"""Products of FP8 (E4M3) numbers that have one scale for each block of the matrix and each 128 columns of a row of x.

The card multiplies numbers of one block of columns; sums are scaled and added up in float32 (DeepSeek-V3, Liu et al.
2024, arXiv 2412.19437, section 3.3).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl

from mmserve.kernels.int4_matmul import sum_of_splits
from mmserve.kernels.quantize_rows import quantize_rows

# Columns that share a scale: of x, and of the matrix.
COLUMNS = 128


def fp8_block_matmul(x: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor, block_rows: int) -> torch.Tensor:
    """x `[M, K]` times a matrix `[N, K]` -> `[M, N]` in x's dtype.

    A weight is `numbers[n, k] * scales[n // block_rows, k // 128]`; x is quantized to 128 columns a scale. K is a
    multiple of 128, `block_rows` of 64.
    """
    num_rows, k = x.shape
    n, num_blocks = numbers.shape[0], k // COLUMNS
    assert k % COLUMNS == 0, "blocks of columns are whole"
    assert block_rows % 64 == 0, "a program's rows share their scales"
    out = torch.empty((num_rows, n), dtype=x.dtype, device=x.device)
    if not num_rows:
        return out
    x_numbers, x_scales = quantize_rows(x.reshape(-1, COLUMNS))
    # Few rows are bound by memory, and need all of the card's processors at work.
    is_small = num_rows <= 64
    block_m = max(16, triton.next_power_of_2(num_rows)) if is_small else 128
    block_n = 64 if is_small or block_rows % 128 else 128
    splits = max(1, min(num_blocks // 4, 528 // triton.cdiv(n, 64))) if is_small else 1
    parts = torch.empty((splits, num_rows, n), dtype=torch.float32, device=x.device) if splits > 1 else out
    grid = (triton.cdiv(num_rows, block_m), triton.cdiv(n, block_n), splits)
    _block_matmul_kernel[grid](
        x_numbers,
        x_scales,
        numbers,
        scales,
        parts,
        num_rows,
        n,
        k,
        block_rows,
        triton.cdiv(num_blocks, splits),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=COLUMNS,
        num_warps=4 if is_small else 8,
        num_stages=4 if is_small else 3,
    )
    if splits > 1:
        sum_of_splits(parts, out)
    return out


@triton.jit(do_not_specialize=["M"])
def _block_matmul_kernel(
    x,
    x_scales,
    numbers,
    scales,
    out,
    M,
    N,
    K,
    block_rows,
    BLOCKS_A_SPLIT,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out `[splits, M, N]` float32 or, of one split, in x's dtype."""
    i_split, num_blocks = tl.program_id(2), K // BLOCK_K
    o_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    m_m, m_n = o_m < M, o_n < N
    p_x = x + o_m[:, None].to(tl.int64) * K + o_k[None, :]
    p_w = numbers + o_n[None, :].to(tl.int64) * K + o_k[:, None]
    p_scale = scales + tl.program_id(1) * BLOCK_N // block_rows * num_blocks
    b_out = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    first = i_split * BLOCKS_A_SPLIT
    for i_block in range(first, tl.minimum(first + BLOCKS_A_SPLIT, num_blocks)):
        b_x = tl.load(p_x + i_block * BLOCK_K, mask=m_m[:, None], other=0.0)
        b_w = tl.load(p_w + i_block * BLOCK_K, mask=m_n[None, :], other=0.0)
        b_scale = tl.load(x_scales + o_m * num_blocks + i_block, mask=m_m, other=0.0) * tl.load(p_scale + i_block)
        b_out += tl.dot(b_x, b_w) * b_scale[:, None]
    p_out = out + (i_split.to(tl.int64) * M + o_m[:, None]) * N + o_n[None, :]
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])
