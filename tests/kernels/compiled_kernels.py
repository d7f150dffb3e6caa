"""What the tests of the CPU's compiled kernels share."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Half a step between neighbouring bfloat16, over the smaller of them.
HALF_STEP = 2.0**-8


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def is_rounded_once(out: torch.Tensor, exact: torch.Tensor, slack: torch.Tensor | float) -> bool:
    """Whether bfloat16 is as near as it can be to what float64 gives, where `slack` is the error of float32 sums."""
    assert out.dtype is torch.bfloat16
    assert out.shape == exact.shape
    error = (out.double() - exact.double()).abs()
    return bool((error <= HALF_STEP * exact.double().abs() + slack).all())


def random_bfloats(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
