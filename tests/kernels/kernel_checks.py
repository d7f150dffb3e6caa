"""What the tests of the kernels share: with a GPU they run there, without one in Triton's interpreter."""

import math

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter has no rounding of its own for bfloat16: it cuts off.
TOLERANCES = [(torch.float32, 1e-5), (torch.float16, 1e-3), (torch.bfloat16, 1e-2)]


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """In the norm; NaN anywhere is an error of infinity."""
    error = float((out.double() - reference.double()).norm() / reference.double().norm())
    return error if math.isfinite(error) else math.inf


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)
