"""FP8 products with a scale for each block: the kernel against its twin, and the twin against the formula."""

import pytest
import torch
from kernel_checks import DEVICE, randn, relative_error

from mmserve.kernels import reference_quant
from mmserve.kernels.fp8_matmul import fp8_block_matmul


def random_blocks(n: int, k: int, block_rows: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    scales = 0.01 + torch.rand(-(-n // block_rows), k // 128, device=DEVICE)
    return (20 * randn(n, k)).to(torch.float8_e4m3fn), scales


def fp8_rows(num_rows: int, k: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows that FP8 has exactly: the interpreter cuts off where a card rounds."""
    x = (20 * randn(num_rows, k)).to(torch.float8_e4m3fn).float()
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
