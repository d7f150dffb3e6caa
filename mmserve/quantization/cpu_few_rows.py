"""Four or eight bits on a CPU: a few rows are multiplied by the packed matrix, many by it in bfloat16.

Decoding is bound by memory, prefill by arithmetic. For many rows there is either a prepacked copy of the matrix, or it
is unpacked for the call, piece by piece.
"""

from dataclasses import replace

import torch

from mmserve.kernels.compiled import has_compiled_kernels
from mmserve.quantization.dense import HAS_ONEDNN, PrepackedWeight
from mmserve.quantization.grouped_ints import GroupedInts
from mmserve.quantization.scheme import Placement

# All of SmolLM2's layers for 1, 4, 8 and 16 rows: 6.9, 9.7, 15.4 and 29 ms packed, 22 to 23 ms as prepacked bfloat16;
# its output layer 2.7, 2.8, 3.9 and 7.5 ms, and 4.5 to 4.9 (one core of a Xeon with AMX).
MAX_PACKED_ROWS = 8
# 4096 x 4096 of four bits for 16, 32, 64 and 256 rows: 4.5, 8.8, 17.5 and 70 ms packed, 10.3, 10.8, 12.4 and 19 ms
# unpacked for the call (the same core).
MAX_PACKED_ROWS_WITHOUT_COPY = 32
# Columns that compiled kernels take at a time, in and out.
_LANES = 16
# Rows of the matrix that are unpacked at once, which stay in a core's cache.
_PIECE = 512


def can_multiply_few_rows(ints: GroupedInts, placement: Placement) -> bool:
    """Whether `FewRowsWeight` takes this matrix."""
    return (
        placement.device.type == "cpu"
        and placement.dtype is torch.bfloat16
        and not placement.is_small
        and HAS_ONEDNN
        and ints.out_features % _LANES == 0
        and ints.group_size % _LANES == 0
        and has_compiled_kernels()
    )


class FewRowsWeight:
    """Scales, and what the middle of the numbers stands for, are rounded to float16."""

    def __init__(self, ints: GroupedInts, *, keeps_copy: bool) -> None:
        from mmserve.kernels import few_rows

        self._kernels = few_rows
        self._out_features = ints.out_features
        self._packed = few_rows.pack(ints.numbers, ints.scales, ints.offsets, ints.bits)
        few_rows.compile_product(self._packed)
        plain = replace(ints, order=None)
        self._dense = PrepackedWeight(plain.dequantized().bfloat16()) if keeps_copy else None

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if x.shape[0] <= (MAX_PACKED_ROWS if self._dense else MAX_PACKED_ROWS_WITHOUT_COPY):
            return self._kernels.product(x.contiguous(), self._packed, bias)
        if self._dense is not None:
            return self._dense.apply(x, bias)
        out = x.new_empty(x.shape[0], self._out_features)
        for start in range(0, self._out_features, _PIECE):
            stop = min(start + _PIECE, self._out_features)
            out[:, start:stop] = x @ self._kernels.transposed(self._packed, start, stop)
        return out if bias is None else out.add_(bias)
