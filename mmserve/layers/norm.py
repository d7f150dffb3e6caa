"""Normalisation layers."""

import torch

from mmserve.kernels.reference import rms_norm


class RMSNorm:
    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x `[..., size of the weight]`."""
        return rms_norm(x, self._weight, self._eps)
