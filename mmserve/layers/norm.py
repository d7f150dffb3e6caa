"""Normalisation layers."""

import torch
import torch.nn.functional as F

from mmserve.kernels.reference import rms_norm


class RMSNorm:
    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x `[..., size of the weight]`."""
        return rms_norm(x, self._weight, self._eps)


class LayerNorm:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> None:
        self._weight = weight
        self._bias = bias
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x `[..., size of the weight]`."""
        return F.layer_norm(x, self._weight.shape, self._weight, self._bias, self._eps)
