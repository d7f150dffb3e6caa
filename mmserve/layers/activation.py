"""Activation functions of vision towers, by their names in Hugging Face's configurations."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F

from mmserve.errors import SetupError

Activation = Callable[[torch.Tensor], torch.Tensor]
_ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
}


def activation(name: str) -> Activation:
    """`SetupError` (`model_unavailable`) lists what there is if `name` is not."""
    if name not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise SetupError("model_unavailable", f"activation {name!r} of the vision tower is not one of {known}")
    return _ACTIVATIONS[name]
