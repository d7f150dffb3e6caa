"""AWQ's `gemm` checkpoints (Lin et al. 2023, arXiv 2306.00978), as AutoAWQ writes them.

`qweight` int32 `[in, out / 8]` has eight columns a word, `qzeros` int32 `[in / group, out / 8]` likewise, `scales`
float16 `[in / group, out]`. Without `qzeros` the zero point is 8.
"""

from collections.abc import Mapping
from typing import Any

import torch

from mmserve.errors import SetupError
from mmserve.quantization.bits import unpack_in_order
from mmserve.quantization.grouped import grouped_weight
from mmserve.quantization.grouped_ints import GroupedInts
from mmserve.quantization.scheme import LinearSpec, LinearWeight, Placement, TensorSource

# The nibble of a word in which each of its eight columns stands.
_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_PER_WORD = 8


class AwqScheme:
    def __init__(self, config: Mapping[str, Any]) -> None:
        """`config` is the checkpoint's `quantization_config`. Raises `SetupError` for a layout that is not served."""
        bits, version = config.get("bits", config.get("w_bit", 4)), str(config.get("version", "gemm")).lower()
        if bits != 4 or version != "gemm":
            raise SetupError(
                "model_unavailable",
                f"an AWQ checkpoint of {bits} bits in the layout {version!r} is not served: only 4 bits in gemm are",
            )
        self._group_size = int(config.get("group_size", config.get("q_group_size", 128)))

    def load(self, spec: LinearSpec, source: TensorSource, placement: Placement) -> LinearWeight | None:
        if not source.has(f"{spec.names[0]}.qweight"):
            return None
        sizes = zip(spec.names, spec.out_features, strict=True)
        return grouped_weight([self._ints(name, spec.in_features, size, source) for name, size in sizes], placement)

    def _ints(self, name: str, in_features: int, out_features: int, source: TensorSource) -> GroupedInts:
        group_size = in_features if self._group_size == -1 else self._group_size
        num_groups, num_words = in_features // group_size, out_features // _PER_WORD
        numbers = source.take(f"{name}.qweight", (in_features, num_words))
        scales = source.take(f"{name}.scales", (num_groups, out_features))
        zeros = torch.full_like(scales, 8.0)
        if source.has(f"{name}.qzeros"):
            zeros = _columns(source.take(f"{name}.qzeros", (num_groups, num_words)))
        return GroupedInts.with_zeros(
            _columns(numbers).T.contiguous(),
            scales.T.contiguous(),
            zeros.T.contiguous(),
            bits=4,
            group_size=group_size,
        )


def _columns(words: torch.Tensor) -> torch.Tensor:
    return unpack_in_order(words, 4, _ORDER)
