"""Rows of activations in eight bits, each with a scale of its own."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl

# The largest number that a row's largest value becomes.
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
# Added to a number below 2**22 and taken away again, it leaves the whole number that is nearest.
_ROUNDS: tl.constexpr = tl.constexpr(1.5 * 2**23)


@triton.jit
def _quantize_rows_kernel(x, out, scales, x_stride, LARGEST: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    o_columns = tl.arange(0, BLOCK)
    m_columns = o_columns < SIZE
    b_x = tl.load(x + i_row * x_stride + o_columns, mask=m_columns, other=0.0).to(tl.float32)
    b_scale = tl.maximum(tl.max(tl.abs(b_x)) / LARGEST, 1e-12)
    b_numbers = b_x / b_scale
    if out.dtype.element_ty == tl.int8:
        b_numbers = (b_numbers + _ROUNDS) - _ROUNDS
    tl.store(out + i_row * SIZE + o_columns, b_numbers.to(out.dtype.element_ty), mask=m_columns)
    tl.store(scales + i_row, b_scale)


def quantize_rows(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x `[M, K]` -> FP8 (E4M3) or int8 `[M, K]` and float32 scales `[M, 1]`.

    A row's largest value becomes the largest number, of int8 that without a sign.
    """
    num_rows, size = x.shape
    assert x.stride(1) == 1, "the values of a row lie side by side"
    out = torch.empty((num_rows, size), dtype=dtype, device=x.device)
    scales = torch.empty((num_rows, 1), dtype=torch.float32, device=x.device)
    if num_rows:
        block = triton.next_power_of_2(size)
        _quantize_rows_kernel[(num_rows,)](
            x,
            out,
            scales,
            x.stride(0),
            LARGEST=LARGEST[dtype],
            SIZE=size,
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
        )
    return out, scales
