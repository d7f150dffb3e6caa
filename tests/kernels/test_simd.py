"""What compiled kernels are made of, through small kernels of their own."""

from typing import Any

import pytest
import torch
from compiled_kernels import random_bfloats

from mmserve.kernels import simd
from mmserve.kernels.jit import Kernel, float_bits


def _exp(arguments: Any) -> None:
    x, out, count = simd.unpack(arguments, 0, 3)
    for at in range(0, 4 * count, 4 * simd.LANES):
        simd.store_floats(out + at, simd.exp(simd.load_floats(x + at)))


def _narrow(arguments: Any) -> None:
    x, out, count = simd.unpack(arguments, 0, 3)
    for i in range(0, count, simd.LANES):
        simd.store_bfloats(out + 2 * i, simd.load_floats(x + 4 * i))


def _widen(arguments: Any) -> None:
    x, out, count = simd.unpack(arguments, 0, 3)
    for i in range(0, count, simd.LANES):
        simd.store_floats(out + 4 * i, simd.load_bfloats(x + 2 * i))


def _sums(arguments: Any) -> None:
    """The total of the products, and x scaled."""
    x, y, out, factor_bits = simd.unpack(arguments, 0, 4)
    factor = simd.float_of_bits(factor_bits)
    simd.store_float(out, simd.total(simd.multiply(simd.load_floats(x), simd.load_floats(y))))
    simd.store_float(out + 4, simd.inverse_root(simd.load_float(x)))
    simd.store_float(out + 8, factor)


def run(function: Any, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Of as many numbers as x has, a multiple of 16."""
    out = torch.empty(x.shape, dtype=dtype)
    Kernel(function)(1, x.data_ptr(), out.data_ptr(), x.numel())
    return out


def test_exp_is_as_near_as_it_says() -> None:
    x = torch.cat((torch.linspace(-87.0, 88.0, 1 << 18), torch.linspace(-1.0, 1.0, 1 << 16)))
    exact = x.double().exp()
    assert float((run(_exp, x, torch.float32).double() / exact - 1.0).abs().max()) < 3e-7


def test_exp_beyond_its_bounds() -> None:
    x = torch.tensor([-87.1, -88.0, -1e4, -3e38, -torch.inf, 0.0, -0.0, 88.1, 1e4, torch.inf, torch.nan, -torch.nan])
    out = run(_exp, torch.cat((x, torch.zeros(4))), torch.float32)
    assert not bool(out[:5].any())
    assert out[5:7].tolist() == [1.0, 1.0]
    assert bool(out[7:10].isposinf().all())
    assert bool(out[10:12].isnan().all())


def test_bfloats_are_rounded_to_the_nearest_and_ties_to_even() -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(1 << 31), 1 << 31, (1 << 16,), generator=generator).to(torch.int32)
    ties = (bits & -(1 << 16)) | 0x8000
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 3.4e38, -3.4e38, 1e-45, 1.17e-38] * 2).view(torch.int32)
    x = torch.cat((bits, ties, ties - 1, ties + 1, special)).view(torch.float32)
    x[x.isnan()] = 1.0
    assert torch.equal(run(_narrow, x, torch.bfloat16).view(torch.int16), x.bfloat16().view(torch.int16))


def test_every_bfloat_is_widened_and_narrowed_to_itself() -> None:
    x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    wide = run(_widen, x, torch.float32)
    assert torch.equal(wide.view(torch.int32), x.view(torch.int16).to(torch.int32) << 16)
    assert torch.equal(run(_narrow, wide, torch.bfloat16).view(torch.int16), x.view(torch.int16))


def test_numbers_handed_over_and_sums_of_lanes() -> None:
    x, y = random_bfloats(16).float().abs(), random_bfloats(16, seed=1).float()
    out = torch.empty(3)
    Kernel(_sums)(1, x.data_ptr(), y.data_ptr(), out.data_ptr(), float_bits(-1e-5))
    expected = [float((x.double() * y.double()).sum()), float(x[0]) ** -0.5, -1e-5]
    assert out.tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("value", "bits"), [(1.0, 0x3F800000), (0.0, 0), (-2.0, -(1 << 30)), (2.0**-149, 1)])
def test_float_bits(value: float, bits: int) -> None:
    assert float_bits(value) == bits


def test_memory_needs_no_alignment_beyond_two_bytes() -> None:
    x = random_bfloats(33)
    out = torch.empty(66, dtype=torch.int16)
    Kernel(_widen)(1, x.data_ptr() + 2, out.data_ptr() + 2, 32)
    assert torch.equal(out[1:65].view(torch.uint8).clone().view(torch.float32), x[1:].float())
