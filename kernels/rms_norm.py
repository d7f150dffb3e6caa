"""Root-mean-square norm, alone and after the addition of the residual (Zhang and Sennrich 2019)."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl

# Up to so many rows the latency of one row decides, beyond it the bandwidth.
FEW_ROWS = 512


def norm_tile(num_rows: int, size: int) -> tuple[int, int]:
    """Rows a program and warps for a norm over `[num_rows, size]`: each thread holds 16 values, or 32 of many rows."""
    block = triton.next_power_of_2(size)
    if num_rows <= FEW_ROWS:
        return 1, min(max(block // 512, 1), 16)
    rows = max(4096 // block, 1)
    return rows, min(max(rows * block // 1024, 1), 16)


@triton.jit
def tile_of_rows(num_rows, SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Offsets and mask `[ROWS, BLOCK]` of this program's rows."""
    o_rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o_columns = tl.arange(0, BLOCK)
    o_values = o_rows[:, None].to(tl.int64) * SIZE + o_columns[None, :]
    return o_values, (o_rows < num_rows)[:, None] & (o_columns < SIZE)[None, :]


@triton.jit
def load_sum(x, residual, total, o_values, m_values):
    """x in float32; or x and the residual added and rounded as a separate addition would, which goes to `total`."""
    b_x = tl.load(x + o_values, mask=m_values, other=0.0)
    if residual is not None:
        b_residual = tl.load(residual + o_values, mask=m_values, other=0.0)
        b_x = (b_x.to(tl.float32) + b_residual.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + o_values, b_x, mask=m_values)
    return b_x.to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x, residual, weight, out, total, num_rows, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    o_values, m_values = tile_of_rows(num_rows, SIZE, BLOCK, ROWS)
    o_columns = tl.arange(0, BLOCK)
    b_weight = tl.load(weight + o_columns, mask=o_columns < SIZE, other=0.0).to(tl.float32)
    b_x = load_sum(x, residual, total, o_values, m_values)
    b_mean_square = tl.sum(b_x * b_x, axis=1) / SIZE
    b_out = b_x * tl.rsqrt(b_mean_square + eps)[:, None] * b_weight[None, :]
    tl.store(out + o_values, b_out.to(out.dtype.element_ty), mask=m_values)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Over the last axis of x `[..., size]`, in float32 inside."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _launch(x, None, weight, out, None, eps)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of x and residual, `[T, size]` each, normed; and the sum itself, in its dtype."""
    x, residual = x.contiguous(), residual.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    _launch(x, residual, weight, out, total, eps)
    return out, total


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor | None,
    eps: float,
) -> None:
    size = x.shape[-1]
    num_rows = x.numel() // size
    if num_rows == 0:
        return
    rows, num_warps = norm_tile(num_rows, size)
    _rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
        x,
        residual,
        weight,
        out,
        total,
        num_rows,
        eps,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        ROWS=rows,
        num_warps=num_warps,
    )
