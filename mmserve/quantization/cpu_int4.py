"""Matrices on a CPU in as few bytes as a file has them, multiplied by PyTorch's packed product of four bits.

For many rows they are unpacked for the call, piece by piece.
"""

from dataclasses import replace
from functools import cache

import torch
import torch.nn.functional as F

from mmserve.quantization.dense import HAS_ONEDNN
from mmserve.quantization.grouped_ints import GroupedInts
from mmserve.quantization.nibble_pairs import factor_of, paired_input, paired_numbers
from mmserve.quantization.packed_nibbles import LayeredNibbles, PackedNibbles, PlainNibbles, pieces_of
from mmserve.quantization.packed_scales import ScalesInParts, packed_scales
from mmserve.quantization.scheme import Placement

# What the packed product takes.
GROUP_SIZES = (32, 64, 128, 256)
# 4096 x 4096, 64, 128 and 512 rows: 32, 71 and 257 ms packed, 40, 43 and 60 ms unpacked for the call (one core with
# AMX).
MAX_PACKED_ROWS = 96
# The packed layout is by blocks of rows; so many rows make a piece, which stays in a core's cache.
_BLOCK = 64
_PIECE = 4 * _BLOCK
# Of numbers that are taken apart for a product; 1 MiB was the best of 1/8 to 4 MiB. And of groups whose scales and
# offsets are multiplied out: the best of 2 ** 15 to 2 ** 19.
_PIECE_BYTES = 1 << 20
_PIECE_GROUPS = 1 << 16
_MIDDLE = 8


def can_pack_for_cpu(ints: GroupedInts, placement: Placement) -> bool:
    """Whether `CpuInt4Weight` takes this matrix: the product is slow in other precisions than bfloat16."""
    group_size = _packed_group_size(ints)
    return (
        placement.device.type == "cpu"
        and placement.dtype is torch.bfloat16
        and not placement.keeps_copy
        and HAS_ONEDNN
        and group_size is not None
        and ints.out_features % 16 == 0
    )


def _packed_group_size(ints: GroupedInts) -> int | None:
    """Columns of the largest groups that the product takes, of which each of the matrix is one or several."""
    columns_of_number = 1 if ints.bits <= 4 else 2
    sizes = [size // columns_of_number for size in GROUP_SIZES]
    return max((size for size in sizes if ints.group_size % size == 0), default=None)


class CpuInt4Weight:
    """Scales and offsets are rounded to bfloat16; wider numbers are in pairs."""

    def __init__(self, ints: GroupedInts) -> None:
        plain, group_size = replace(ints, order=None), _packed_group_size(ints)
        assert group_size is not None
        self._group_size = group_size
        self._factor = factor_of(ints.bits)
        is_paired = self._factor > 1
        numbers = paired_numbers(ints.numbers, ints.bits, group_size) if is_paired else ints.numbers
        self._packed_group_size = 2 * group_size if is_paired else group_size
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers.to(torch.int32), 1)
        self._out_features, self._num_bytes = packed.shape
        self._scales = packed_scales(plain, ints.group_size // group_size)
        num_groups = numbers.shape[1] // self._packed_group_size
        limits = [_PIECE_GROUPS // num_groups] if isinstance(self._scales, ScalesInParts) else []
        self._nibbles: PackedNibbles = PlainNibbles(packed)
        if LayeredNibbles.takes(ints.bits):
            self._nibbles = LayeredNibbles(packed, ints.bits, group_size)
            limits.append(_PIECE_BYTES // self._num_bytes)
        # What needs not be taken apart is multiplied whole: slicing would delay a product by 5 us.
        self._whole = None if limits else (packed, self._scales.pairs(0, self._out_features))
        self._product_rows = max(min(limits, default=0) // _BLOCK, 1) * _BLOCK

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if x.shape[0] > MAX_PACKED_ROWS:
            return self._unpacking_product(x, bias)
        halves = x if self._factor == 1 else paired_input(x, self._group_size, self._factor)
        out = self._packed_product(halves)
        return out if bias is None else out + bias

    def _packed_product(self, x: torch.Tensor) -> torch.Tensor:
        if self._whole is not None:
            packed, scales = self._whole
            out: torch.Tensor = torch._weight_int4pack_mm_for_cpu(x, packed, self._packed_group_size, scales)
            return out
        outs = [
            torch._weight_int4pack_mm_for_cpu(
                x, self._nibbles.rows(start, stop), self._packed_group_size, self._scales.pairs(start, stop)
            )
            for start, stop in pieces_of(self._out_features, self._product_rows)
        ]
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)

    def _unpacking_product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = x.new_empty(x.shape[0], self._out_features)
        for start, stop in pieces_of(self._out_features, _PIECE):
            out[:, start:stop] = F.linear(x, self._unpacked(start, stop))
        return out if bias is None else out.add_(bias)

    def _unpacked(self, start: int, stop: int) -> torch.Tensor:
        """Rows `start` to `stop` in bfloat16: whole blocks, or the smaller one at the end."""
        block, num_columns = min(_BLOCK, stop - start), self._num_bytes * 2
        packed = self._nibbles.rows(start, stop)
        columns_first = packed.view(-1, num_columns, block // 2).transpose(1, 2)
        halves = torch.cat((columns_first & 0xF, columns_first >> 4), dim=1)
        numbers = halves.index_select(1, packed_rows(block)).flatten(0, 1).bfloat16().sub_(_MIDDLE)
        pairs = self._scales.pairs(start, stop).transpose(0, 1)
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
