"""Weights in the precision of computation."""

import torch
import torch.nn.functional as F

HAS_ONEDNN: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
# Rows assumed when oneDNN picks its blocked layout. Packed for 16, SmolLM2's layers took 5.2, 7.8 and 228 ms for 1, 16
# and 1,024 rows (bf16, 2 cores of an EPYC 9005) where plain weights took 8.4, 14.2 and 264 ms.
_ROWS_HINT = 16


class DenseWeight:
    """A plain matrix."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, self._weight, bias)


class PrepackedWeight:
    """A matrix in oneDNN's blocked layout, so that the product does not reorder it at every call."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        return out


def dense_weight(weight: torch.Tensor) -> DenseWeight | PrepackedWeight:
    """The fastest form of a matrix on its device."""
    can_prepack = weight.device.type == "cpu" and weight.dtype is torch.bfloat16 and HAS_ONEDNN
    return PrepackedWeight(weight) if can_prepack else DenseWeight(weight)
