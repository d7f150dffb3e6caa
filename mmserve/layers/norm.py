"""Normalisation layers."""

import torch

from mmserve.layers.kernel_set import KernelSet


class RMSNorm:
    """Root-mean-square norm over the last axis (Zhang and Sennrich 2019)."""

    def __init__(self, weight: torch.Tensor, eps: float, kernels: KernelSet) -> None:
        self._kernels = kernels
        self._weight = weight
        self._eps = eps
        self._doubled_weight = torch.cat((weight, weight))
        self._signs = weight.new_tensor([[1.0], [-1.0]])
        self._on_cpu = weight.device.type == "cpu"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x `[..., size of the weight]`."""
        if self._on_cpu and x.ndim == 2 and x.shape[0] == 1:
            return self._norm_one_row(x * self._signs)
        return self._kernels.rms_norm(x, self._weight, self._eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of x and residual, `[T, size]` each, normed; and the sum, to be handed on as `residual`.

        On a CPU the sum of a single row is followed by its negative.
        """
        if not self._on_cpu:
            return self._kernels.add_rms_norm(x, residual, self._weight, self._eps)
        if x.shape[0] == 1:
            both = residual if residual.shape[0] == 2 else residual * self._signs
            total = torch.addcmul(both, self._signs, x)
            return self._norm_one_row(total), total
        total = residual + x
        return self._kernels.rms_norm(total, self._weight, self._eps), total

    def _norm_one_row(self, both: torch.Tensor) -> torch.Tensor:
        """As the layer norm of x and -x, whose mean is zero: one kernel where PyTorch's RMS norm is seven.

        With the sum 4.7 against 10.3 us for 576 values in bf16 on an EPYC 9005, 61 times a token in SmolLM2.
        """
        size = both.shape[1]
        both = both.view(1, 2 * size)
        return torch.layer_norm(both, both.shape[-1:], self._doubled_weight, None, self._eps)[:, :size]


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
