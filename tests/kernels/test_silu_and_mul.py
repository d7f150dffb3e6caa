"""The gated activation of a GPU against its twin."""

import pytest
import torch
from kernel_checks import DEVICE, TOLERANCES, randn, relative_error

from mmserve.kernels import reference
from mmserve.kernels.silu_and_mul import silu_and_mul


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 10), (6, 64), (3, 300), (2, 2500), (0, 8)])
def test_silu_and_mul(dtype: torch.dtype, tolerance: float, num_rows: int, size: int) -> None:
    x = 3 * randn(num_rows, 2 * size, dtype=dtype)
    before = x.clone()
    out = silu_and_mul(x)
    assert out.dtype == dtype
    assert out.shape == (num_rows, size)
    assert torch.equal(x, before)
    if num_rows:
        assert relative_error(out, reference.silu_and_mul(x.float())) < tolerance


def test_gates_far_from_zero() -> None:
    gate = torch.tensor([[-80.0, 0.0, 80.0, 1e4]], device=DEVICE)
    out = silu_and_mul(torch.cat((gate, torch.full_like(gate, 3.0)), dim=1))
    assert out[0].tolist() == pytest.approx([0.0, 0.0, 240.0, 3e4], abs=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_rows", "size"), [(1, 11008), (256, 11008), (2831, 18944), (11088, 3456), (30000, 3420), (100000, 18944)]
)
def test_silu_and_mul_of_real_sizes(num_rows: int, size: int) -> None:
    x = 3 * randn(num_rows, 2 * size, dtype=torch.bfloat16)
    out = silu_and_mul(x)
    rows = torch.randint(0, num_rows, (64,), device=x.device)
    for some in (rows, slice(0, 1), slice(-1, None)):
        assert relative_error(out[some], reference.silu_and_mul(x[some].float())) < 1e-2
