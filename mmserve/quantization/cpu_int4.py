"""Four bits on a CPU: PyTorch's packed product for a few rows, bfloat16 for many.

Decoding is bound by memory, prefill by arithmetic. For many rows there is either a prepacked copy of the matrix, or it
is unpacked for the call, piece by piece.
"""

from dataclasses import replace
from functools import cache

import torch
import torch.nn.functional as F

from mmserve.quantization.dense import HAS_ONEDNN, PrepackedWeight
from mmserve.quantization.grouped_ints import GroupedInts
from mmserve.quantization.nibble_pairs import factor_of, paired, paired_input
from mmserve.quantization.scheme import Placement

# What the packed product takes.
GROUP_SIZES = (32, 64, 128, 256)
# The packed product works on four rows at a time. All of SmolLM2's layers for 1, 4, 5 and 16 rows: 1.9, 3.0, 5.5 and
# 13.1 ms packed; 5.2, 6.1, 5.2 and 7.8 ms as prepacked bf16 (2 cores of an EPYC 9005).
MAX_PACKED_ROWS = 4
# Without a copy. 4096 x 4096, 64, 128 and 512 rows: 32, 71 and 257 ms packed, 40, 43 and 60 ms unpacked for the call
# (one core with AMX).
MAX_PACKED_ROWS_WITHOUT_COPY = 96
# The packed layout is by blocks of rows; so many make a piece, which stays in a core's cache.
_BLOCK = 64
_BLOCKS_A_PIECE = 4
_MIDDLE = 8


def can_pack_for_cpu(ints: GroupedInts, placement: Placement) -> bool:
    """Whether `CpuInt4Weight` takes this matrix: the product is slow in other precisions than bfloat16."""
    group_size = ints.group_size if ints.bits <= 4 else 2 * ints.group_size
    return (
        placement.device.type == "cpu"
        and placement.dtype is torch.bfloat16
        and HAS_ONEDNN
        # With a copy, pairs of nibbles would be no faster than the copy is.
        and (ints.bits <= 4 or not placement.keeps_copy)
        and group_size in GROUP_SIZES
        and ints.out_features % 16 == 0
    )


class CpuInt4Weight:
    """Scales and offsets are rounded to bfloat16, as the packed product takes them; wider numbers are in pairs."""

    def __init__(self, ints: GroupedInts, *, keeps_copy: bool = True) -> None:
        plain = replace(ints, order=None)
        self._group_size = ints.group_size
        self._factor = factor_of(ints.bits)
        halves = paired(plain) if self._factor > 1 else plain
        # PyTorch's formula is (number - 8) * scale + offset.
        pairs = torch.stack((halves.scales, halves.offsets + _MIDDLE * halves.scales), dim=-1)
        self._scales_and_offsets = pairs.transpose(0, 1).contiguous().bfloat16()
        self._packed_group_size = halves.group_size
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(halves.numbers.to(torch.int32), 1)
        self._dense = PrepackedWeight(plain.dequantized().bfloat16()) if keeps_copy else None

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self._dense is not None and x.shape[0] > MAX_PACKED_ROWS:
            return self._dense.apply(x, bias)
        if x.shape[0] > MAX_PACKED_ROWS_WITHOUT_COPY:
            return self._unpacking_product(x, bias)
        halves = x if self._factor == 1 else paired_input(x, self._group_size, self._factor)
        out = torch._weight_int4pack_mm_for_cpu(halves, self._packed, self._packed_group_size, self._scales_and_offsets)
        return out if bias is None else out + bias

    def _unpacking_product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = x.new_empty(x.shape[0], self._packed.shape[0])
        size = _BLOCK * _BLOCKS_A_PIECE
        whole = out.shape[1] // _BLOCK * _BLOCK
        pieces = [(start, min(start + size, whole)) for start in range(0, whole, size)]
        if whole < out.shape[1]:
            pieces.append((whole, out.shape[1]))
        for start, stop in pieces:
            out[:, start:stop] = F.linear(x, self._unpacked(start, stop))
        return out if bias is None else out.add_(bias)

    def _unpacked(self, start: int, stop: int) -> torch.Tensor:
        """Rows `start` to `stop` in bfloat16: whole blocks, or the smaller one at the end."""
        block, num_columns = min(_BLOCK, stop - start), self._packed.shape[1] * 2
        packed = self._packed.flatten()[start * num_columns // 2 : stop * num_columns // 2]
        columns_first = packed.view(-1, num_columns, block // 2).transpose(1, 2)
        halves = torch.cat((columns_first & 0xF, columns_first >> 4), dim=1)
        numbers = halves.index_select(1, packed_rows(block)).flatten(0, 1).bfloat16().sub_(_MIDDLE)
        pairs = self._scales_and_offsets[:, start:stop].transpose(0, 1)
        scales, offsets = pairs[:, :, :1], pairs[:, :, 1:]
        if self._factor > 1:
            highs, lows = numbers.view(len(numbers), -1, 2, self._group_size).unbind(dim=2)
            # Both are small whole numbers: nothing is rounded before the scale.
            grouped = torch.add(lows, highs, alpha=self._factor)
            scales, offsets = scales / self._factor, offsets * (1 + 1 / self._factor)
        else:
            grouped = numbers.view(len(numbers), -1, self._group_size)
        return torch.addcmul(offsets, grouped, scales).flatten(1)


@cache
def packed_rows(block: int) -> torch.Tensor:
    """Where the low nibbles of a block's bytes, and after them the high ones, have each of its rows; int64 `[block]`.

    The layout depends on the processor, so it is read off from a block whose numbers say their row.
    """
    rows = torch.arange(block, dtype=torch.int32)[:, None].expand(block, 2 * GROUP_SIZES[0])
    pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu
    low, high = (pack(digits.contiguous(), 1).flatten()[: block // 2] for digits in (rows % 16, rows // 16))
    at = torch.cat(((low & 0xF) + 16 * (high & 0xF), (low >> 4) + 16 * (high >> 4)))
    return torch.argsort(at.long())
