"""The rotation of heads on a GPU against its twin."""

import pytest
import torch
from kernel_checks import DEVICE, TOLERANCES, randn, relative_error

from mmserve.kernels import reference
from mmserve.kernels.rotary import apply_rotary


def tables(num_tokens: int, head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    angles = 100 * torch.rand(num_tokens, 1, head_dim // 2, device=DEVICE)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("table_dtype", [torch.float32, None], ids=["float32", "own"])
@pytest.mark.parametrize(("num_tokens", "num_heads", "head_dim"), [(1, 1, 8), (5, 3, 80), (9, 7, 72), (40, 2, 64)])
def test_apply_rotary(
    dtype: torch.dtype,
    tolerance: float,
    table_dtype: torch.dtype | None,
    num_tokens: int,
    num_heads: int,
    head_dim: int,
) -> None:
    check_rotary(num_tokens, num_heads, head_dim, dtype, table_dtype or dtype, tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 128])
@pytest.mark.parametrize("num_tokens", [1, 11088])
def test_apply_rotary_of_real_sizes(num_tokens: int, head_dim: int) -> None:
    check_rotary(num_tokens, 32, head_dim, torch.bfloat16, torch.float32, 1e-2)


def check_rotary(
    num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype, table_dtype: torch.dtype, tolerance: float
) -> None:
    """The heads in the middle of wider rows, as q and k lie in the product of a layer."""
    rows = randn(num_tokens, num_heads + 3, head_dim, dtype=dtype)
    before = rows.clone()
    cos, sin = tables(num_tokens, head_dim, table_dtype)
    out = apply_rotary(rows[:, 1 : num_heads + 1], cos, sin)
    expected = reference.apply_rotary(rows[:, 1 : num_heads + 1].float(), cos.float(), sin.float())
    assert out.dtype == dtype
    assert out.is_contiguous()
    assert relative_error(out, expected) < tolerance
    assert torch.equal(rows, before)


def test_no_tokens() -> None:
    assert apply_rotary(randn(0, 4, 16), *tables(0, 16, torch.float32)).shape == (0, 4, 16)


def test_the_twin_keeps_the_dtype_and_computes_in_the_wider() -> None:
    x = randn(50, 2, 16, dtype=torch.bfloat16)
    cos, sin = tables(50, 16, torch.float32)
    assert torch.equal(reference.apply_rotary(x, cos, sin), reference.apply_rotary(x.float(), cos, sin).bfloat16())
