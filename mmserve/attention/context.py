"""Per-step tensors, passed explicitly to every `forward`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ForwardContext:
    """`cos` and `sin` `[T, 1, D]`; one paged cache a layer; `attention` is the backend's own.

    `fits_scales`: layers find the scales of their K and V by what they see in this step.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    kv_caches: Sequence[torch.Tensor]
    attention: object
    fits_scales: bool = False
