"""The norms of a GPU against their twins."""

import pytest
import torch
from kernel_checks import DEVICE, TOLERANCES, randn, relative_error

from mmserve.kernels import layer_norm, reference, rms_norm

EPS = 1e-5
SHAPES = [(1, 40), (3, 64), (7, 100), (rms_norm.FEW_ROWS + 3, 24)]
LARGE_SHAPES = [
    (1, 4096), (16, 4096), (256, 4096), (8192, 4096), (2831, 3584), (11088, 1280), (30000, 1280), (3, 8192), (2, 18944)
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norms(dtype: torch.dtype, tolerance: float, shape: tuple[int, int]) -> None:
    check_norms(shape, dtype, tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", LARGE_SHAPES, ids=str)
def test_norms_of_real_sizes(shape: tuple[int, int]) -> None:
    check_norms(shape, torch.bfloat16, 1e-2)


def check_norms(shape: tuple[int, int], dtype: torch.dtype, tolerance: float) -> None:
    x, weight, bias = 5 * randn(*shape, dtype=dtype) + 1, randn(shape[1], dtype=dtype), randn(shape[1], dtype=dtype)
    normed = rms_norm.rms_norm(x, weight, EPS)
    assert normed.dtype == dtype
    assert relative_error(normed, reference.rms_norm(x.float(), weight.float(), EPS)) < tolerance
    normed = layer_norm.layer_norm(x, weight, bias, EPS)
    assert normed.dtype == dtype
    assert relative_error(normed, reference.layer_norm(x.float(), weight.float(), bias.float(), EPS)) < tolerance


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norms_after_an_addition(dtype: torch.dtype, tolerance: float, shape: tuple[int, int]) -> None:
    check_added_norms(shape, dtype, tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", LARGE_SHAPES, ids=str)
def test_norms_after_an_addition_of_real_sizes(shape: tuple[int, int]) -> None:
    check_added_norms(shape, torch.bfloat16, 1e-2)


def check_added_norms(shape: tuple[int, int], dtype: torch.dtype, tolerance: float) -> None:
    x, residual = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype)
    weight, bias = randn(shape[1], dtype=dtype), randn(shape[1], dtype=dtype)
    wide_x, wide_residual, wide_weight, wide_bias = x.float(), residual.float(), weight.float(), bias.float()
    expected = reference.add_rms_norm(wide_x, wide_residual, wide_weight, EPS)
    normed, total = rms_norm.add_rms_norm(x, residual, weight, EPS)
    assert total.dtype == normed.dtype == dtype
    assert relative_error(total, wide_x + wide_residual) < tolerance
    assert relative_error(normed, expected[0]) < tolerance
    expected = reference.add_layer_norm(wide_x, wide_residual, wide_weight, wide_bias, EPS)
    normed, total = layer_norm.add_layer_norm(x, residual, weight, bias, EPS)
    assert total.dtype == normed.dtype == dtype
    assert relative_error(total, wide_x + wide_residual) < tolerance
    assert relative_error(normed, expected[0]) < tolerance


def test_the_sum_is_rounded_before_its_norm() -> None:
    x, residual, weight = randn(4, 32, dtype=torch.float16), randn(4, 32, dtype=torch.float16), randn(32)
    normed, total = rms_norm.add_rms_norm(x, 4000 * residual, weight, EPS)
    assert torch.equal(total, x + 4000 * residual)
    assert relative_error(normed, reference.rms_norm(total.float(), weight, EPS)) < 1e-3


def test_norms_keep_eps() -> None:
    x, weight = torch.full((2, 4), 1e-3, device=DEVICE), torch.ones(4, device=DEVICE)
    assert relative_error(rms_norm.rms_norm(x, weight, 1.0), x / (1.0 + 1e-6) ** 0.5) < 1e-5
    x[:, ::2] *= -1
    assert relative_error(layer_norm.layer_norm(x, weight, 0 * weight, 1.0), x / (1.0 + 1e-6) ** 0.5) < 1e-5


def test_norms_over_more_axes_and_of_views() -> None:
    x, weight, bias = randn(2, 3, 48)[..., 8:32], randn(24), randn(24)
    before = x.clone()
    assert relative_error(rms_norm.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS)) < 1e-5
    expected = reference.layer_norm(x, weight, bias, EPS)
    assert relative_error(layer_norm.layer_norm(x, weight, bias, EPS), expected) < 1e-5
    assert torch.equal(x, before)


def test_norms_of_nothing() -> None:
    x, weight = randn(0, 16), randn(16)
    assert rms_norm.rms_norm(x, weight, EPS).shape == (0, 16)
    assert layer_norm.add_layer_norm(x, x, weight, weight, EPS)[1].shape == (0, 16)
