"""Products of eight bits, scaled by rows and by blocks, and rows in eight bits; against twins and formulas."""

import pytest
import torch
from kernel_checks import DEVICE, randn, relative_error

from mmserve.kernels import reference_quant
from mmserve.kernels.eight_bit_matmul import eight_bit_matmul, fp8_block_matmul
from mmserve.kernels.quantize_rows import quantize_rows

FP8 = torch.float8_e4m3fn


def random_blocks(n: int, k: int, block_rows: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    scales = 0.01 + torch.rand(-(-n // block_rows), k // 128, device=DEVICE)
    return (20 * randn(n, k)).to(FP8), scales


def fp8_rows(num_rows: int, k: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows that FP8 has exactly: the interpreter cuts off where a card rounds."""
    x = (20 * randn(num_rows, k)).to(FP8).float()
    x[:, ::128] = 448.0
    return (x * 2.0 ** torch.randint(-8, 2, (num_rows, 1), device=DEVICE)).to(dtype)


def test_twin() -> None:
    """Of a row whose numbers are whole: no rounding hides a scale that is in the wrong place."""
    numbers, scales = random_blocks(200, 384)
    x = torch.zeros(3, 384, device=DEVICE)
    x[0, 5], x[1, 130], x[2, 383] = 448.0, 224.0, -448.0
    out = reference_quant.fp8_block_matmul(x, numbers, scales, 128)
    for i, column in enumerate((5, 130, 383)):
        expected = [
            float(x[i, column] * numbers[n, column].float() * scales[n // 128, column // 128]) for n in range(200)
        ]
        torch.testing.assert_close(out[i].cpu(), torch.tensor(expected))


@pytest.mark.parametrize(("n", "k"), [(64, 128), (200, 384), (256, 1024)])
@pytest.mark.parametrize("num_rows", [0, 1, 5, 17, 70])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernel(num_rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    numbers, scales = random_blocks(n, k)
    x = fp8_rows(num_rows, k, dtype)
    out = fp8_block_matmul(x, numbers, scales, 128)
    expected = reference_quant.fp8_block_matmul(x, numbers, scales, 128)
    assert (out.dtype, out.shape) == (dtype, (num_rows, n))
    if num_rows:
        # The products of a card's FP8 units keep some 14 bits.
        assert relative_error(out, expected) < (5e-3 if dtype is torch.bfloat16 or DEVICE.type == "cuda" else 1e-5)


def test_other_blocks() -> None:
    numbers, scales = random_blocks(150, 256, block_rows=64)
    x = fp8_rows(4, 256)
    out, expected = (
        product(x, numbers, scales, 64) for product in (fp8_block_matmul, reference_quant.fp8_block_matmul)
    )
    assert relative_error(out, expected) < (5e-3 if DEVICE.type == "cuda" else 1e-5)


@pytest.mark.parametrize("numbers_dtype", [FP8, torch.int8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_rows", "n", "k"), [(1, 64, 128), (5, 70, 2048), (17, 130, 144), (40, 64, 256), (0, 64, 128)]
)
def test_products_by_rows(numbers_dtype: torch.dtype, dtype: torch.dtype, num_rows: int, n: int, k: int) -> None:
    x, numbers = ((40 * randn(rows, k)).clamp(-127, 127).to(numbers_dtype) for rows in (num_rows, n))
    x_scales, scales = 0.01 + torch.rand(num_rows, 1, device=DEVICE), 0.01 + torch.rand(n, device=DEVICE)
    out = eight_bit_matmul(x, x_scales, numbers, scales, dtype)
    assert (out.dtype, out.shape) == (dtype, (num_rows, n))
    if num_rows:
        expected = (x.double() @ numbers.double().T) * x_scales * scales
        # The products of a card's FP8 units keep some 14 bits.
        tolerance = 5e-3 if dtype is torch.bfloat16 or DEVICE.type == "cuda" else 1e-5
        assert relative_error(out, expected) < tolerance
        assert (
            relative_error(reference_quant.eight_bit_matmul(x, x_scales, numbers, scales, dtype), expected) < tolerance
        )


@pytest.mark.gpu
@pytest.mark.parametrize("numbers_dtype", [FP8, torch.int8])
@pytest.mark.parametrize("num_rows", [1, 16, 17, 64, 130])
@pytest.mark.parametrize(("n", "k"), [(4096, 11008), (22016, 4096), (1000, 11152)])
def test_products_by_rows_of_real_sizes(numbers_dtype: torch.dtype, num_rows: int, n: int, k: int) -> None:
    """Many steps a program; 11,152 columns end in the middle of one."""
    x, numbers = ((40 * randn(rows, k)).clamp(-127, 127).to(numbers_dtype) for rows in (num_rows, n))
    x_scales, scales = 0.01 + torch.rand(num_rows, 1, device=DEVICE), 0.01 + torch.rand(n, device=DEVICE)
    expected = (x.float() @ numbers.float().T) * x_scales * scales
    for _ in range(2):
        out = eight_bit_matmul(x, x_scales, numbers, scales, torch.bfloat16)
        assert relative_error(out, expected) < 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 16, 64, 130])
def test_blocks_of_real_sizes(num_rows: int) -> None:
    numbers, scales = random_blocks(4096, 11008)
    x = fp8_rows(num_rows, 11008, torch.bfloat16)
    expected = reference_quant.fp8_block_matmul(x, numbers, scales, 128)
    assert relative_error(fp8_block_matmul(x, numbers, scales, 128), expected) < 5e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "size"), [(1, 16), (5, 100), (3, 4096), (0, 16)])
def test_rows_as_fp8(dtype: torch.dtype, num_rows: int, size: int) -> None:
    x = 3 * randn(num_rows, size, dtype=dtype)
    if num_rows > 1:
        x[1] = 0
    numbers, scales = quantize_rows(x, FP8)
    expected, expected_scales = reference_quant.quantize_rows(x, FP8)
    torch.testing.assert_close(scales, expected_scales)
    assert numbers.dtype is FP8
    if num_rows:
        # The interpreter cuts off where a card rounds.
        tolerance = 0.04 if DEVICE.type == "cuda" else 0.12
        assert relative_error(numbers.float() * scales, x.float()) < tolerance
        assert relative_error(numbers.float(), expected.float()) < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "size"), [(1, 16), (5, 100), (3, 4096), (0, 16)])
def test_rows_as_int8(dtype: torch.dtype, num_rows: int, size: int) -> None:
    x = 3 * randn(num_rows, size, dtype=dtype)
    if num_rows > 1:
        x[1] = 0
    numbers, scales = quantize_rows(x, torch.int8)
    expected, expected_scales = reference_quant.quantize_rows(x, torch.int8)
    torch.testing.assert_close(scales, expected_scales)
    # Numbers halfway between two fall to either side by the last bit of a scale.
    assert float((numbers != expected).float().sum()) <= 0.01 * numbers.numel()
    assert not num_rows or int((numbers.int() - expected.int()).abs().max()) <= 1
    assert not num_rows or int(numbers.abs().max()) == 127
