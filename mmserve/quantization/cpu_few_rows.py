"""Four or eight bits beside a copy, on a CPU: a few rows are multiplied by the packed matrix, many by the copy.

Decoding is bound by memory, prefill by arithmetic.
"""

from dataclasses import replace

import torch

from mmserve.kernels.cpu import has_compiled_kernels
from mmserve.quantization.dense import HAS_ONEDNN, PrepackedWeight
from mmserve.quantization.grouped_ints import GroupedInts
from mmserve.quantization.scheme import Placement

# All of SmolLM2's layers for 1, 4, 8 and 16 rows: 6.9, 9.7, 15.4 and 29 ms packed, 22 to 23 ms as prepacked bfloat16;
# its output layer 2.7, 2.8, 3.9 and 7.5 ms, and 4.5 to 4.9 (one core of a Xeon with AMX).
MAX_PACKED_ROWS = 8
# Columns that compiled kernels take at a time, in and out.
_LANES = 16


def can_multiply_few_rows(ints: GroupedInts, placement: Placement) -> bool:
    """Whether `FewRowsWeight` takes this matrix."""
    return (
        placement.device.type == "cpu"
        and placement.dtype is torch.bfloat16
        and placement.keeps_copy
        and not placement.is_small
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
        self._packed = few_rows.pack(ints.numbers, ints.scales, ints.offsets, ints.bits)
        few_rows.compile_product(self._packed)
        self._dense = PrepackedWeight(replace(ints, order=None).dequantized().bfloat16())

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if x.shape[0] > MAX_PACKED_ROWS:
            return self._dense.apply(x, bias)
        return self._kernels.product(x.contiguous(), self._packed, bias)
