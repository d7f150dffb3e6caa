"""Normalisation layers."""

import torch
import torch.nn.functional as F

from mmserve.layers.kernel_set import KernelSet


class RMSNorm:
    """Root-mean-square norm over the last axis (Zhang and Sennrich 2019)."""

    def __init__(self, weight: torch.Tensor, eps: float, kernels: KernelSet) -> None:
        self._kernels = kernels
        self._weight = weight
        self._doubled_weight = torch.cat((weight, weight))
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x `[..., size of the weight]`."""
        if x.ndim == 2 and x.shape[0] == 1 and x.device.type == "cpu":
            return self._norm_one_row(x)
        return self._kernels.rms_norm(x, self._weight, self._eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of x and residual, `[T, size]` each, normed; and the sum."""
        if x.device.type == "cpu":
            total = residual + x
            return self(total), total
        return self._kernels.add_rms_norm(x, residual, self._weight, self._eps)

    def _norm_one_row(self, x: torch.Tensor) -> torch.Tensor:
        """As the layer norm of x and -x side by side, whose mean is zero: one kernel where PyTorch's RMS norm is seven.

        4.5 against 9.1 us for 576 values in bf16 on an EPYC 9005, 61 times a token in SmolLM2.
        """
        both = torch.cat((x, -x), dim=-1)
        return F.layer_norm(both, both.shape[-1:], self._doubled_weight, None, self._eps)[:, : x.shape[-1]]


class LayerNorm:
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
