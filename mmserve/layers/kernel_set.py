"""Which implementation of the small kernels a device gets."""

from typing import Protocol

import torch

from mmserve.kernels import reference
from mmserve.kernels.compiled import has_compiled_kernels


class KernelSet(Protocol):
    """The functions of `kernels/reference.py` that layers call, by whatever is fastest on the device."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor: ...

    def add_layer_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor: ...

    def apply_rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor: ...

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor: ...


def kernel_set(device: torch.device) -> KernelSet:
    """Triton's on a GPU; on a CPU compiled ones, or PyTorch's own operations where these cannot be."""
    if device.type == "cuda":
        from mmserve.kernels import fused

        return fused
    if not has_compiled_kernels():
        return reference
    from mmserve.kernels import cpu_fused

    return cpu_fused
