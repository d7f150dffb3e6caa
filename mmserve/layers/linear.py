"""Linear layers over whatever form their weight is held in."""

from typing import Protocol

import torch


class LinearWeight(Protocol):
    """A matrix `[out, in]` in some precision and layout."""

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x `[T, in]` -> `[T, out]`."""


class Linear:
    """`x @ weight.T + bias`."""

    def __init__(self, weight: LinearWeight, bias: torch.Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._weight.apply(x, self._bias)
