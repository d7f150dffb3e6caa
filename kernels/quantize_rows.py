"""Rows of activations as FP8, each with a scale of its own."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl

FP8_MAX = 448.0
_SMALLEST_SCALE = 1e-12


@triton.jit
def _quantize_rows_kernel(x, out, scales, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    o_columns = tl.arange(0, BLOCK)
    m_columns = o_columns < SIZE
    b_x = tl.load(x + i_row * x_stride + o_columns, mask=m_columns, other=0.0).to(tl.float32)
    b_scale = tl.maximum(tl.max(tl.abs(b_x)) / 448.0, 1e-12)
    tl.store(out + i_row * SIZE + o_columns, (b_x / b_scale).to(out.dtype.element_ty), mask=m_columns)
    tl.store(scales + i_row, b_scale)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x `[M, K]` -> FP8 (E4M3) `[M, K]` and float32 scales `[M, 1]`, a row's largest value at the end of the range."""
    num_rows, size = x.shape
    assert x.stride(1) == 1, "the values of a row lie side by side"
    out = torch.empty((num_rows, size), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((num_rows, 1), dtype=torch.float32, device=x.device)
    if num_rows:
        block = triton.next_power_of_2(size)
        num_warps = min(max(block // 512, 1), 16)
        _quantize_rows_kernel[(num_rows,)](x, out, scales, x.stride(0), SIZE=size, BLOCK=block, num_warps=num_warps)
    return out, scales
