"""From a vision tower's features to tokens of the decoder's size: two layers (Liu et al. 2023, arXiv 2310.03744)."""

import torch

from mmserve.layers.activation import activation
from mmserve.weights.layer_loader import LayerLoader


class Projector:
    def __init__(self, loader: LayerLoader, in_size: int, out_size: int, *, act: str, bias: bool) -> None:
        self._first = loader.linear(["projector.linear_1"], in_size, (out_size,), bias=bias)
        self._second = loader.linear(["projector.linear_2"], out_size, (out_size,), bias=bias)
        self._activation = activation(act)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, in_size]` -> `[T, out_size]`."""
        return self._second(self._activation(self._first(x)))
