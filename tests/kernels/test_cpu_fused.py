"""The small compiled kernels of a CPU against their twins in float64, and where they leave the work to these."""

import pytest
import torch
from compiled_kernels import is_rounded_once, random_bfloats, torch_threads
from kernel_checks import relative_error

from mmserve.kernels import cpu_fused, reference

EPS = 1e-5
# From 16,384 numbers on several threads work.
SHAPES = [(1, 16), (2, 64), (3, 576), (17, 48), (300, 64), (31, 1536), (2, 18944)]
INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_rms_norm(shape: tuple[int, int], threads: int) -> None:
    x, weight = 5 * random_bfloats(*shape), random_bfloats(shape[1], seed=1)
    before = x.clone()
    with torch_threads(threads):
        out = cpu_fused.rms_norm(x, weight, EPS)
    exact = reference.rms_norm(x.double(), weight.double(), EPS)
    assert is_rounded_once(out, exact, 1e-6 * exact.abs())
    assert torch.equal(x, before)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_sum_is_rounded_before_its_norm(shape: tuple[int, int], threads: int) -> None:
    x, residual, weight = (random_bfloats(*size, seed=i) for i, size in enumerate((shape, shape, shape[1:])))
    before = x.clone(), residual.clone()
    with torch_threads(threads):
        out, total = cpu_fused.add_rms_norm(x, 3 * residual, weight, EPS)
    assert torch.equal(total, x + 3 * residual)
    exact = reference.rms_norm(total.double(), weight.double(), EPS)
    assert is_rounded_once(out, exact, 1e-6 * exact.abs())
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


def test_norms_keep_eps() -> None:
    x, weight = torch.full((2, 16), 2.0**-10).bfloat16(), torch.ones(16).bfloat16()
    expected = x.double() / (1.0 + 2.0**-20) ** 0.5
    assert is_rounded_once(cpu_fused.rms_norm(x, weight, 1.0), expected, 0.0)
    assert is_rounded_once(cpu_fused.add_rms_norm(x, 0 * x, weight, 1.0)[0], expected, 0.0)


def test_norms_of_zeros_and_of_what_is_not_finite() -> None:
    """A row is spoilt alone."""
    x, weight = random_bfloats(4, 64), random_bfloats(64, seed=1)
    x[0], x[1, 5], x[2, 6] = 0.0, NAN, INF
    for out in (
        cpu_fused.rms_norm(x, weight, EPS),
        cpu_fused.add_rms_norm(x, 0 * weight.expand(4, 64), weight, EPS)[0],
    ):
        assert not bool(out[0].any())
        assert bool(out[1].isnan().all())
        assert bool(out[2, 6].isnan())
        exact = reference.rms_norm(x[3:].double(), weight.double(), EPS)
        assert is_rounded_once(out[3:], exact, 1e-6 * exact.abs())


def test_norms_over_more_axes() -> None:
    x, weight = random_bfloats(2, 5, 3, 32), random_bfloats(32, seed=1)
    exact = reference.rms_norm(x.double(), weight.double(), EPS)
    assert is_rounded_once(cpu_fused.rms_norm(x, weight, EPS), exact, 1e-6 * exact.abs())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [8, 24, 72, 1000])
def test_norms_of_other_sizes(dtype: torch.dtype, size: int) -> None:
    check_twin_of_norms(*(random_bfloats(*shape).to(dtype) for shape in ((3, size), (3, size), (size,))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_norms_in_other_dtypes(dtype: torch.dtype) -> None:
    check_twin_of_norms(*(random_bfloats(*shape).to(dtype) for shape in ((3, 64), (3, 64), (64,))))


def test_norms_of_views() -> None:
    wide, x, weight = random_bfloats(3, 96), random_bfloats(3, 64, seed=1), random_bfloats(64, seed=2)
    check_twin_of_norms(wide[:, 16:80], x, weight)
    check_twin_of_norms(x, wide[:, 16:80], weight)
    check_twin_of_norms(random_bfloats(64, 3).T, x, weight)
    check_twin_of_norms(x, x, random_bfloats(128, seed=2)[::2])
    # Where a row begins does not matter, as long as rows lie side by side.
    check_twin_of_norms(random_bfloats(200)[5:197].view(3, 64), random_bfloats(200)[3:195].view(3, 64), weight)


def check_twin_of_norms(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> None:
    normed = cpu_fused.rms_norm(x, weight, EPS)
    assert normed.dtype is x.dtype
    assert relative_error(normed, reference.rms_norm(x.double(), weight.double(), EPS)) < 4e-3
    normed, total = cpu_fused.add_rms_norm(x, residual, weight, EPS)
    assert total.dtype is normed.dtype is x.dtype
    assert torch.equal(total, x + residual)
    assert relative_error(normed, reference.rms_norm(total.double(), weight.double(), EPS)) < 4e-3


def test_norms_of_nothing() -> None:
    x, weight = random_bfloats(0, 16), random_bfloats(16)
    assert cpu_fused.rms_norm(x, weight, EPS).shape == (0, 16)
    assert cpu_fused.add_rms_norm(x, x, weight, EPS)[1].shape == (0, 16)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_silu_and_mul(shape: tuple[int, int], threads: int) -> None:
    num_rows, size = shape
    x = 4 * random_bfloats(num_rows, 2 * size)
    before = x.clone()
    with torch_threads(threads):
        out = cpu_fused.silu_and_mul(x)
    exact = reference.silu_and_mul(x.double())
    assert is_rounded_once(out, exact, 1e-6 * exact.abs())
    assert torch.equal(x, before)


def test_silu_of_every_gate_that_is_not_lost() -> None:
    """Below -87 its size is under the smallest normal number of float32, or nearly."""
    gate = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    gate = gate[gate.float() >= -87.0].contiguous()
    gate = torch.cat((gate, gate.new_zeros(-len(gate) % 16)))[None]
    out = cpu_fused.silu_and_mul(torch.cat((gate, torch.ones_like(gate)), dim=1))
    exact = reference.silu_and_mul(torch.cat((gate, torch.ones_like(gate)), dim=1).double())
    is_finite = exact.isfinite()
    assert int(is_finite.sum()) > 48000
    assert is_rounded_once(out[is_finite], exact[is_finite], 1e-6 * exact[is_finite].abs() + 2.0**-133)


def test_silu_of_gates_far_from_zero() -> None:
    gates = [-3e38, -1e4, -300.0, -100.0, -88.0, -0.0, 0.0, 88.0, 100.0, 300.0, 1e4, 1e38, INF, NAN, 1.0, -1.0]
    gate = torch.tensor([gates]).bfloat16()
    out = cpu_fused.silu_and_mul(torch.cat((gate, torch.full_like(gate, 2.0)), dim=1))[0]
    assert out[:5].abs().tolist() == pytest.approx([0.0] * 5, abs=1e-33)
    assert not bool(out[5:7].any())
    assert torch.equal(out[7:13], 2 * gate[0, 7:13])
    assert bool(out[13].isnan())
    assert is_rounded_once(
        out[14:], torch.tensor([2 / (1 + 2.718281828459045**-1), -2 / (1 + 2.718281828459045)]), 1e-6
    )


@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_what_is_not_finite_stays_in_its_lane(value: float) -> None:
    x = random_bfloats(3, 128)
    clean, spoilt = cpu_fused.silu_and_mul(x), x.clone()
    spoilt[1, 20], spoilt[2, 64 + 33] = value, value
    out = cpu_fused.silu_and_mul(spoilt)
    places = torch.zeros(3, 64, dtype=torch.bool)
    places[1, 20] = places[2, 33] = True
    assert not bool(out[places].isfinite().any())
    assert torch.equal(out[~places], clean[~places])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 10, 24, 64, 1000])
def test_silu_in_other_dtypes_and_sizes(dtype: torch.dtype, size: int) -> None:
    x = (3 * random_bfloats(5, 2 * size)).to(dtype)
    out = cpu_fused.silu_and_mul(x)
    assert out.dtype is dtype
    assert out.shape == (5, size)
    assert relative_error(out, reference.silu_and_mul(x.double())) < 6e-3


def test_silu_of_views() -> None:
    for x in (random_bfloats(5, 200)[:, 8:136], random_bfloats(128, 5).T, random_bfloats(10, 128)[::2]):
        assert relative_error(cpu_fused.silu_and_mul(x), reference.silu_and_mul(x.double())) < 6e-3


def test_silu_of_nothing() -> None:
    assert cpu_fused.silu_and_mul(random_bfloats(0, 32)).shape == (0, 16)


@pytest.mark.parametrize("shape", [(1, 64), (3, 576), (300, 64), (2, 3, 16)])
def test_sums(shape: tuple[int, ...]) -> None:
    x, residual = random_bfloats(*shape), random_bfloats(*shape, seed=1)
    assert torch.equal(cpu_fused.add(x, residual), reference.add(x, residual))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_other_kinds(dtype: torch.dtype) -> None:
    x = torch.randn(3, 10).to(dtype)
    assert torch.equal(cpu_fused.add(x, x), x + x)
    assert torch.equal(cpu_fused.add(x.T, x.T), (x + x).T)
