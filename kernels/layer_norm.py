"""Layer norm, alone and after the addition of the residual (Ba et al. 2016)."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl

from mmserve.kernels.rms_norm import load_sum, norm_tile, tile_of_rows


@triton.jit(do_not_specialize=["num_rows"])
def _layer_norm_kernel(
    x, residual, weight, bias, out, total, num_rows, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    o_values, m_values = tile_of_rows(num_rows, SIZE, BLOCK, ROWS)
    o_columns = tl.arange(0, BLOCK)
    m_columns = o_columns < SIZE
    b_weight = tl.load(weight + o_columns, mask=m_columns, other=0.0).to(tl.float32)
    b_bias = tl.load(bias + o_columns, mask=m_columns, other=0.0).to(tl.float32)
    b_x = load_sum(x, residual, total, o_values, m_values)
    b_centred = tl.where(m_columns[None, :], b_x - (tl.sum(b_x, axis=1) / SIZE)[:, None], 0.0)
    b_variance = tl.sum(b_centred * b_centred, axis=1) / SIZE
    b_out = b_centred * tl.rsqrt(b_variance + eps)[:, None] * b_weight[None, :] + b_bias[None, :]
    tl.store(out + o_values, b_out.to(out.dtype.element_ty), mask=m_values)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Over the last axis of x `[..., size]`, in float32 inside."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _launch(x, None, weight, bias, out, None, eps)
    return out


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of x and residual, `[T, size]` each, normed; and the sum itself, in its dtype."""
    x, residual = x.contiguous(), residual.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    _launch(x, residual, weight, bias, out, total, eps)
    return out, total


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor | None,
    eps: float,
) -> None:
    size = x.shape[-1]
    num_rows = x.numel() // size
    if num_rows == 0:
        return
    rows, num_warps = norm_tile(num_rows, size)
    _layer_norm_kernel[(triton.cdiv(num_rows, rows),)](
        x,
        residual,
        weight,
        bias,
        out,
        total,
        num_rows,
        eps,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        ROWS=rows,
        num_warps=num_warps,
    )
