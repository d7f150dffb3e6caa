"""Linear layers over whatever form their weight is held in."""

import torch

from mmserve.quantization.scheme import LinearWeight


class Linear:
    """`x @ weight.T + bias`."""

    def __init__(self, weight: LinearWeight, bias: torch.Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._weight.apply(x, self._bias)
