"""Products with four-bit matrices, and rows as FP8, against their twins."""

import pytest
import torch
from kernel_checks import DEVICE, randn, relative_error

from mmserve.kernels import reference_quant
from mmserve.kernels.int4_matmul import dequantize_int4, int4_matmul, tile_int4
from mmserve.kernels.quantize_rows import quantize_rows

DTYPES = [(torch.float32, 1e-5), (torch.float16, 2e-3)] + ([(torch.bfloat16, 1e-2)] if DEVICE.type == "cuda" else [])


def matrix(n: int, k: int, group_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers `[n, k]`, their tiles, scales and offsets."""
    numbers = torch.randint(0, 16, (n, k), device=DEVICE, dtype=torch.uint8)
    num_groups = -(-k // group_size)
    scales = 0.01 + 0.05 * torch.rand(num_groups, n, device=DEVICE)
    return numbers, tile_int4(numbers), scales, 0.1 * torch.randn(num_groups, n, device=DEVICE)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize(
    ("num_rows", "n", "k", "group_size"),
    [(1, 64, 128, 128), (3, 80, 256, 32), (17, 48, 384, 64), (40, 70, 96, 32), (70, 130, 256, 256), (0, 64, 128, 128)],
)
@pytest.mark.parametrize("has_offsets", [False, True])
def test_products(
    dtype: torch.dtype, tolerance: float, num_rows: int, n: int, k: int, group_size: int, has_offsets: bool
) -> None:
    _, words, scales, offsets = matrix(n, k, group_size)
    x = randn(num_rows, k, dtype=dtype)
    given = offsets if has_offsets else None
    out = int4_matmul(x, words, scales, given, group_size)
    assert (out.dtype, out.shape) == (dtype, (num_rows, n))
    if num_rows:
        assert relative_error(out, reference_quant.int4_matmul(x.float(), words, scales, given, group_size)) < tolerance


def test_pieces_of_k_are_summed() -> None:
    """A wide matrix of few rows is cut along its columns."""
    _, words, scales, offsets = matrix(64, 2048, 128)
    x = randn(2, 2048)
    expected = reference_quant.int4_matmul(x, words, scales, offsets, 128)
    assert relative_error(int4_matmul(x, words, scales, offsets, 128), expected) < 1e-5


def test_rows_that_do_not_lie_side_by_side() -> None:
    _, words, scales, _ = matrix(64, 128, 128)
    x = randn(4, 300)[:, 20:148]
    assert (
        relative_error(
            int4_matmul(x, words, scales, None, 128), reference_quant.int4_matmul(x, words, scales, None, 128)
        )
        < 1e-5
    )


@pytest.mark.parametrize(("n", "k", "group_size"), [(64, 128, 128), (70, 96, 32), (48, 384, 64)])
def test_unpacking(n: int, k: int, group_size: int) -> None:
    numbers, words, scales, offsets = matrix(n, k, group_size)
    groups = torch.arange(k, device=DEVICE) // group_size
    expected = (numbers.float() - 8) * scales.T[:, groups] + offsets.T[:, groups]
    for unpack in (dequantize_int4, reference_quant.dequantize_int4):
        torch.testing.assert_close(unpack(words, scales, offsets, group_size, k, torch.float32), expected)


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
