"""Products with four-bit matrices, and their unpacking, against the formula; twins too."""

from typing import NamedTuple

import pytest
import torch
from kernel_checks import DEVICE, randn, relative_error

from mmserve.kernels import reference_quant
from mmserve.kernels.int4_matmul import dequantize_int4, int4_matmul, pack_factors, tile_int4, tiling

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


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 1e-3), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("num_rows", [1, 16, 17, 64, 130, 512])
@pytest.mark.parametrize(("n", "k", "group_size"), [(4096, 11008, 128), (22016, 4096, 64), (1000, 11040, 32)])
@pytest.mark.parametrize("has_offsets", [False, True])
def test_products_of_real_sizes(
    dtype: torch.dtype, tolerance: float, num_rows: int, n: int, k: int, group_size: int, has_offsets: bool
) -> None:
    """Many tiles a program; 11,040 columns end in the middle of one."""
    given = matrix(n, k, group_size, dtype, has_offsets=has_offsets)
    x = randn(num_rows, k, dtype=dtype)
    expected = x.float() @ given.weights(group_size).T
    for _ in range(2):
        assert relative_error(int4_matmul(x, given.words, given.factors, group_size), expected) < tolerance


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
