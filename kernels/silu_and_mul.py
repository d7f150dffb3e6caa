"""The gated activation of a feed-forward layer (Shazeer 2020)."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl

_BLOCK = 2048
_NUM_WARPS = 4


@triton.jit
def _silu_and_mul_kernel(x, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr):
    i_row = (tl.program_id(0) // TILES).to(tl.int64)
    o_columns = (tl.program_id(0) % TILES) * BLOCK + tl.arange(0, BLOCK)
    m_columns = o_columns < SIZE
    b_gate = tl.load(x + i_row * (2 * SIZE) + o_columns, mask=m_columns, other=0.0).to(tl.float32)
    b_up = tl.load(x + i_row * (2 * SIZE) + SIZE + o_columns, mask=m_columns, other=0.0).to(tl.float32)
    b_out = b_gate * tl.sigmoid(b_gate) * b_up
    tl.store(out + i_row * SIZE + o_columns, b_out.to(out.dtype.element_ty), mask=m_columns)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` where x is gate and up side by side, `[T, 2 * I]` -> `[T, I]`, in float32 inside."""
    x = x.contiguous()
    num_rows, size = x.shape[0], x.shape[1] // 2
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    block = min(_BLOCK, triton.next_power_of_2(size))
    tiles = triton.cdiv(size, block)
    _silu_and_mul_kernel[(num_rows * tiles,)](x, out, SIZE=size, BLOCK=block, TILES=tiles, num_warps=_NUM_WARPS)
    return out
