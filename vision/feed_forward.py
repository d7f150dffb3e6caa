"""The feed-forward part of the vision towers' layers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from mmserve.layers.activation import Activation, activation
from mmserve.layers.linear import Linear
from mmserve.quantization.dense import dense_weight
from mmserve.weights.layer_loader import LayerLoader

_ALIGNMENT = 64


@dataclass(frozen=True)
class FeedForwardNames:
    """Of its matrices: one inward, or those of gate and values; and the one outward."""

    inward: Sequence[str]
    outward: str


class VitFeedForward:
    """Two layers around the activation `act`; with two inward matrices `silu(gate) * values` between them."""

    def __init__(self, loader: LayerLoader, names: FeedForwardNames, hidden: int, inner: int, act: str) -> None:
        self._activation: Activation = loader.kernels.silu_and_mul if len(names.inward) == 2 else activation(act)
        width = padded_width(inner, loader.device)
        if width == inner or not all(map(loader.is_full_precision, (*names.inward, names.outward))):
            self._in = loader.linear(names.inward, hidden, [inner] * len(names.inward), bias=True)
            self._out = loader.linear([names.outward], inner, (hidden,), bias=True)
        else:
            self._in, self._out = _padded_layers(loader, names, hidden, inner, width)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._out(self._activation(self._in(x)))


def padded_width(inner: int, device: torch.device) -> int:
    """Products on a GPU lose a third of their speed to a width such as Qwen2.5-VL's 3,420."""
    return -(-inner // _ALIGNMENT) * _ALIGNMENT if device.type == "cuda" else inner


def _padded_layers(
    loader: LayerLoader, names: FeedForwardNames, hidden: int, inner: int, width: int
) -> tuple[Linear, Linear]:
    """Rows of zeros inward, and columns of zeros outward: every activation in use keeps 0, and nothing is added."""
    missing = width - inner
    matrices = [loader.tensor(f"{name}.weight", (inner, hidden)) for name in names.inward]
    biases = [loader.tensor(f"{name}.bias", (inner,)) for name in names.inward]
    inward = torch.cat([F.pad(matrix, (0, 0, 0, missing)) for matrix in matrices])
    inward_bias = torch.cat([F.pad(bias, (0, missing)) for bias in biases])
    outward = F.pad(loader.tensor(f"{names.outward}.weight", (hidden, inner)), (0, missing))
    outward_bias = loader.tensor(f"{names.outward}.bias", (hidden,))
    return Linear(dense_weight(inward), inward_bias), Linear(dense_weight(outward), outward_bias)
