"""What K and V are divided by before an FP8 cache holds them: a number each for a layer."""

import math
from dataclasses import dataclass

import torch

FP8_MAX = 448.0
# How much larger than those of the warm-up values may become before they are cut off.
_HEADROOM = 2.0


@dataclass
class KVScales:
    """As the checkpoint brings them, or else 1 until `fit` has seen what would be cut off.

    FP8 has the same relative precision from 2**-6 to 448, so that a scale only matters outside.
    """

    k: float = 1.0
    v: float = 1.0
    is_known: bool = False

    def fit(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Raise scales to powers of two that hold keys (after their rotation too) and values of such a size."""
        if not self.is_known:
            self.k = max(self.k, _fitting(math.sqrt(2.0) * float(k.abs().max())))
            self.v = max(self.v, _fitting(float(v.abs().max())))


def _fitting(largest: float) -> float:
    needed = _HEADROOM * largest / FP8_MAX
    return 2.0 ** math.ceil(math.log2(needed)) if 1.0 < needed < math.inf else 1.0
