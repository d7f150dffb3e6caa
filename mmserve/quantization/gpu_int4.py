"""Four bits on a GPU, and wider numbers as pairs of four.

Decoding is bound by memory, prefill by arithmetic: our own product for some rows, PyTorch's for many, on a copy of the
matrix or on one that is unpacked for the call.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F

from mmserve.quantization.dense import DenseWeight
from mmserve.quantization.grouped_ints import GroupedInts
from mmserve.quantization.nibble_pairs import factor_of, merged, paired, paired_input
from mmserve.quantization.scheme import Placement

# The layers' products of Llama-2-7B, 64, 128 and 512 rows: 85, 126 and 400 us packed, 116, 121 and 277 us in bfloat16,
# 138 us more where it is unpacked for the call (one H200).
MAX_PACKED_ROWS = 64
MAX_PACKED_ROWS_WITHOUT_COPY = 512


def can_pack_for_gpu(ints: GroupedInts, placement: Placement) -> bool:
    """Whether `GpuInt4Weight` takes this matrix."""
    if placement.device.type != "cuda" or placement.dtype not in (torch.bfloat16, torch.float16):
        return False
    from mmserve.kernels.int4_matmul import takes_groups

    # With a copy, pairs of nibbles would be no faster than the copy is.
    is_worth_it = ints.bits <= 4 or not placement.keeps_copy
    return is_worth_it and takes_groups(ints.group_size if ints.bits <= 4 else 2 * ints.group_size)


class GpuInt4Weight:
    """Scales and offsets are rounded to the precision of computation."""

    def __init__(self, ints: GroupedInts, placement: Placement) -> None:
        from mmserve.kernels import int4_matmul

        self._kernels = int4_matmul
        self._group_size = ints.group_size
        self._factor = factor_of(ints.bits)
        moved = replace(
            ints,
            numbers=ints.numbers.to(placement.device),
            scales=ints.scales.to(placement.device),
            offsets=ints.offsets.to(placement.device),
            order=None,
        )
        halves = paired(moved) if self._factor > 1 else moved
        self._packed_group_size, self._num_columns = halves.group_size, halves.numbers.shape[1]
        offsets = halves.offsets + int4_matmul.MIDDLE * halves.scales
        self._words = int4_matmul.tile_int4(halves.numbers)
        self._factors = int4_matmul.pack_factors(
            halves.scales.T.to(placement.dtype),
            None if placement.is_small and not bool(offsets.any()) else offsets.T.to(placement.dtype),
            self._packed_group_size,
        )
        self._dense = DenseWeight(self._unpacked(placement.dtype)) if placement.keeps_copy else None

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self._dense is not None and x.shape[0] > MAX_PACKED_ROWS:
            return self._dense.apply(x, bias)
        if x.shape[0] > MAX_PACKED_ROWS_WITHOUT_COPY:
            return F.linear(x, self._unpacked(x.dtype), bias)
        halves = x if self._factor == 1 else paired_input(x, self._group_size, self._factor)
        out = self._kernels.int4_matmul(halves, self._words, self._factors, self._packed_group_size)
        return out if bias is None else out + bias

    def _unpacked(self, dtype: torch.dtype) -> torch.Tensor:
        weight = self._kernels.dequantize_int4(
            self._words, self._factors, self._packed_group_size, self._num_columns, dtype
        )
        return weight if self._factor == 1 else merged(weight, self._group_size, self._factor)
