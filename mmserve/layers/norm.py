"""Normalisation layers."""

import torch

from mmserve.layers.kernel_set import KernelSet


class RMSNorm:
    """Root-mean-square norm over the last axis (Zhang and Sennrich 2019)."""

    def __init__(self, weight: torch.Tensor, eps: float, kernels: KernelSet) -> None:
        self._kernels = kernels
        self._weight = weight
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x `[..., size of the weight]`."""
        return self._kernels.rms_norm(x, self._weight, self._eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of x and residual, `[T, size]` each, normed; and the sum."""
        return self._kernels.add_rms_norm(x, residual, self._weight, self._eps)


class LayerNorm:
    """Layer norm over the last axis (Ba et al. 2016)."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, eps: float, kernels: KernelSet) -> None:
        self._kernels = kernels
        self._weight = weight
        self._bias = bias
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x `[..., size of the weight]`."""
        return self._kernels.layer_norm(x, self._weight, self._bias, self._eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of x and residual, `[T, size]` each, normed; and the sum."""
        return self._kernels.add_layer_norm(x, residual, self._weight, self._bias, self._eps)
