"""The kernel against its twin, byte for byte."""

import pytest
import torch
from kernel_checks import DEVICE

from mmserve.kernels import reference
from mmserve.kernels.resample import resample

BITS = 22


def problem(outer: int, length: int, num_pixels: int, inner: int, num_taps: int) -> tuple[torch.Tensor, ...]:
    """Weights that add up to about one, some of them negative, so that sums go over both ends of a byte."""
    image = torch.randint(0, 256, (outer, length, inner), dtype=torch.uint8)
    starts = torch.randint(0, length, (num_pixels,), dtype=torch.int32)
    weights = (torch.randn(num_taps, num_pixels) * 0.4 + 1 / num_taps) * 2**BITS
    return image, starts, weights.int()


@pytest.mark.parametrize("shape", [(1, 30, 21, 45, 5), (7, 40, 55, 3, 6), (2, 1, 3, 3, 1), (1, 9, 400, 6, 2)], ids=str)
def test_the_kernel_equals_its_twin(shape: tuple[int, int, int, int, int]) -> None:
    image, starts, weights = (x.to(DEVICE) for x in problem(*shape))
    expected = reference.resample(image, starts, weights, BITS)
    assert expected.min() == 0 or image.numel() < 10
    assert torch.equal(resample(image, starts, weights, BITS), expected)


@pytest.mark.gpu
def test_the_kernel_equals_its_twin_on_a_page() -> None:
    for shape in ((1, 1754, 1764, 3696, 6), (1754, 1240, 1232, 3, 6)):
        image, starts, weights = (x.cuda() for x in problem(*shape))
        assert torch.equal(resample(image, starts, weights, BITS), reference.resample(image, starts, weights, BITS))
