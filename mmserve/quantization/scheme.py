"""What a scheme of quantization is: from a checkpoint's tensors to matrices that multiply."""

from dataclasses import dataclass
from typing import Protocol

import torch


class LinearWeight(Protocol):
    """A matrix `[out, in]` in some precision and layout."""

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x `[T, in]` -> `[T, out]`."""


class TensorSource(Protocol):
    """A checkpoint's tensors by name, as they are stored."""

    def has(self, name: str) -> bool: ...

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Raises `SetupError` if the tensor is absent or not of `shape`."""

    def take_any(self, name: str) -> torch.Tensor:
        """As `take`, of whatever shape it is stored in."""

    def ignore(self, name: str) -> None:
        """The tensor may be there, and says nothing that is not known."""


@dataclass(frozen=True)
class Placement:
    """Where a model computes, and in which precision.

    `keeps_copy`: quantized matrices may have a copy in the precision of computation beside them, where that is faster.
    `is_small`: they are held in as few bytes as they can be multiplied from, which is slower.
    """

    dtype: torch.dtype
    device: torch.device
    keeps_copy: bool = True
    is_small: bool = False


@dataclass(frozen=True)
class LinearSpec:
    """Matrices `[out, in]` of the same input, stacked by rows; `names` are those of their modules."""

    names: tuple[str, ...]
    in_features: int
    out_features: tuple[int, ...]


def has_fp8_products(device: torch.device) -> bool:
    """Whether a GPU multiplies FP8 numbers as such (Ada, Hopper and later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


class QuantizationScheme(Protocol):
    """How the matrices of a checkpoint are stored, and how they are multiplied."""

    def load(self, spec: LinearSpec, source: TensorSource, placement: Placement) -> LinearWeight | None:
        """None where the checkpoint leaves these matrices in full precision. Raises `SetupError`."""


class StackedWeights:
    """Matrices of the same input that cannot be held as one, their outputs side by side."""

    def __init__(self, weights: list[LinearWeight]) -> None:
        self._weights = weights

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = torch.cat([weight.apply(x, None) for weight in self._weights], dim=-1)
        return out if bias is None else out + bias
