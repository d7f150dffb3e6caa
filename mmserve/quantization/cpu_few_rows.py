"""Four or eight bits beside a copy, on a CPU: a few rows are multiplied by the packed matrix, many by the copy.

Decoding is bound by memory, prefill by arithmetic.
"""

from dataclasses import replace

import torch

from mmserve.kernels.cpu import has_compiled_kernels
from mmserve.quantization.dense import HAS_ONEDNN, PrepackedWeight
from mmserve.quantization.grouped_ints import GroupedInts
from mmserve.quantization.scheme import Placement

MAX_PACKED_ROWS = 4
# Columns that compiled kernels take at a time, in and out.
_LANES = 16


def can_multiply_few_rows(ints: GroupedInts, placement: Placement) -> bool:
    """Whether `FewRowsWeight` takes this matrix."""
    return (
        placement.device.type == "cpu"
        and placement.dtype is torch.bfloat16
        and placement.keeps_copy
        and HAS_ONEDNN
        and ints.out_features % _LANES == 0
        and ints.group_size % _LANES == 0
        and has_compiled_kernels()
    )


class FewRowsWeight:
    """Scales and offsets are rounded to float16."""

    def __init__(self, ints: GroupedInts) -> None:
        from mmserve.kernels import few_rows

        self._kernels = few_rows
        bits = 4 if ints.bits <= 4 else 8
        few_rows.compile_product(bits)
        self._packed = few_rows.pack(ints.numbers, ints.scales, ints.offsets, bits)
        self._dense = PrepackedWeight(replace(ints, order=None).dequantized().bfloat16())

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if x.shape[0] > MAX_PACKED_ROWS:
            return self._dense.apply(x, bias)
        out = self._kernels.product(x.contiguous(), self._packed)
        return out if bias is None else out + bias
