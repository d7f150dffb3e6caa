"""Products with four-bit matrices, and rows as FP8, against their twins."""

from typing import NamedTuple

import pytest
import torch
from kernel_checks import DEVICE, randn, relative_error

from mmserve.kernels import reference_quant
from mmserve.kernels.fp8_matmul import fp8_matmul
from mmserve.kernels.int4_matmul import dequantize_int4, int4_matmul, pack_factors, tile_int4, tiling
from mmserve.kernels.quantize_rows import quantize_rows

DTYPES = [(torch.float16, 1e-3)] + ([(torch.bfloat16, 1e-2)] if DEVICE.type == "cuda" else [])


class Matrix(NamedTuple):
    """Numbers `[n, k]`, scales and offsets `[groups, n]`, and what kernels take."""

    numbers: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None
    words: torch.Tensor
    factors: torch.Tensor

    def weights(self, group_size: int) -> torch.Tensor:
        groups = torch.arange(self.numbers.shape[1], device=DEVICE) // group_size
        weights = (self.numbers.float() - 8) * self.scales.float().T[:, groups]
        return weights if self.offsets is None else weights + self.offsets.float().T[:, groups]


def matrix(n: int, k: int, group_size: int, dtype: torch.dtype = torch.float16, *, has_offsets: bool = True) -> Matrix:
    numbers = torch.randint(0, 16, (n, k), device=DEVICE, dtype=torch.uint8)
    scales = (0.01 + 0.05 * torch.rand(k // group_size, n, device=DEVICE)).to(dtype)
    offsets = 0.1 * randn(k // group_size, n, dtype=dtype) if has_offsets else None
    return Matrix(numbers, scales, offsets, tile_int4(numbers), pack_factors(scales, offsets, group_size))


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize(
    ("num_rows", "n", "k", "group_size"),
    [
        (1, 64, 128, 128),
        (3, 80, 256, 32),
        (17, 48, 384, 64),
        (40, 70, 96, 32),
        (70, 130, 256, 256),
        (5, 64, 768, 256),
        (130, 130, 192, 64),
        (0, 64, 128, 128),
    ],
)
@pytest.mark.parametrize("has_offsets", [False, True])
def test_products(
    dtype: torch.dtype, tolerance: float, num_rows: int, n: int, k: int, group_size: int, has_offsets: bool
) -> None:
    given = matrix(n, k, group_size, dtype, has_offsets=has_offsets)
    x = randn(num_rows, k, dtype=dtype)
    for multiply in (int4_matmul, reference_quant.int4_matmul):
        out = multiply(x, given.words, given.factors, group_size)
        assert (out.dtype, out.shape) == (dtype, (num_rows, n))
        if num_rows:
            assert relative_error(out, x.float() @ given.weights(group_size).T) < tolerance


def test_pieces_of_k_are_summed() -> None:
    """A wide matrix of few rows is cut along its columns; what counts the pieces is as it was before."""
    given = matrix(64, 2048, 128)
    x = randn(2, 2048, dtype=torch.float16)
    assert tiling(2, 64, 2048).num_splits > 1
    first, second = (int4_matmul(x, given.words, given.factors, 128) for _ in range(2))
    assert relative_error(first, x.float() @ given.weights(128).T) < 1e-3
    assert torch.equal(first, second)


def test_rows_that_do_not_lie_side_by_side() -> None:
    given = matrix(64, 128, 128)
    x = randn(4, 300, dtype=torch.float16)[:, 20:148]
    assert relative_error(int4_matmul(x, given.words, given.factors, 128), x.float() @ given.weights(128).T) < 1e-3


@pytest.mark.parametrize("has_offsets", [False, True])
@pytest.mark.parametrize(("n", "k", "group_size"), [(64, 128, 128), (70, 96, 32), (48, 384, 64), (20, 768, 256)])
def test_unpacking(n: int, k: int, group_size: int, has_offsets: bool) -> None:
    given = matrix(n, k, group_size, has_offsets=has_offsets)
    expected = given.weights(group_size)
    for unpack in (dequantize_int4, reference_quant.dequantize_int4):
        weights = unpack(given.words, given.factors, group_size, k, torch.float16)
        torch.testing.assert_close(weights.float(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "n", "k"), [(1, 64, 128), (5, 70, 2048), (17, 130, 144), (0, 64, 128)])
def test_fp8_products(dtype: torch.dtype, num_rows: int, n: int, k: int) -> None:
    x, numbers = ((20 * randn(rows, k)).to(torch.float8_e4m3fn) for rows in (num_rows, n))
    x_scales, scales = 0.01 + torch.rand(num_rows, 1, device=DEVICE), 0.01 + torch.rand(n, device=DEVICE)
    out = fp8_matmul(x, x_scales, numbers, scales, dtype)
    assert (out.dtype, out.shape) == (dtype, (num_rows, n))
    if num_rows:
        expected = (x.double() @ numbers.double().T) * x_scales * scales
        # The products of a card's FP8 units keep some 14 bits.
        tolerance = 5e-3 if dtype is torch.bfloat16 or DEVICE.type == "cuda" else 1e-5
        assert relative_error(out, expected) < tolerance
        assert relative_error(reference_quant.fp8_matmul(x, x_scales, numbers, scales, dtype), expected) < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "size"), [(1, 16), (5, 100), (3, 4096), (0, 16)])
def test_rows_as_fp8(dtype: torch.dtype, num_rows: int, size: int) -> None:
    x = 3 * randn(num_rows, size, dtype=dtype)
    if num_rows > 1:
        x[1] = 0
    numbers, scales = quantize_rows(x)
    expected, expected_scales = reference_quant.quantize_rows(x)
    torch.testing.assert_close(scales, expected_scales)
    assert numbers.dtype is torch.float8_e4m3fn
    if num_rows:
        # The interpreter cuts off where a card rounds.
        tolerance = 0.04 if DEVICE.type == "cuda" else 0.12
        assert relative_error(numbers.float() * scales, x.float()) < tolerance
        assert relative_error(numbers.float(), expected.float()) < tolerance
