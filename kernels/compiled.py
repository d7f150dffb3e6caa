"""Whether a CPU's compiled kernels can be had, and for which tensors."""

import logging
from functools import cache

import torch

_logger = logging.getLogger(__name__)
# Heads are rotated by halves of whole vectors.
_HEAD_STEP = 32


@cache
def has_compiled_kernels() -> bool:
    """Whether `cpu_fused`, `cpu_decode` and `few_rows` run here: with Numba, on the threads of a PyTorch of Linux."""
    try:
        from mmserve.kernels import openmp  # noqa: F401
    except ImportError as error:
        _logger.warning("PyTorch's operations stand in for compiled kernels, which are faster: %s", error)
        return False
    return True


def can_attend(dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int) -> bool:
    """Whether compiled attention is for these activations, this paged cache, and heads of this size."""
    return dtype is cache_dtype is torch.bfloat16 and head_dim % _HEAD_STEP == 0 and has_compiled_kernels()
