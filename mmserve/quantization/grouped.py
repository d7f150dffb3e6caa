"""The forms in which grouped numbers are held and multiplied."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from mmserve.quantization.dense import HAS_ONEDNN, PrepackedWeight, dense_weight
from mmserve.quantization.gpu_int4 import GpuInt4Weight, can_pack_for_gpu
from mmserve.quantization.grouped_ints import GroupedInts
from mmserve.quantization.scheme import LinearWeight, Placement, StackedWeights

# What PyTorch's packed product takes.
CPU_GROUP_SIZES = (32, 64, 128, 256)
# The packed product works on four rows at a time. All of SmolLM2's layers for 1, 4, 5 and 16 rows: 1.9, 3.0, 5.5 and
# 13.1 ms packed; 5.2, 6.1, 5.2 and 7.8 ms as prepacked bf16 (2 cores of an EPYC 9005).
MAX_PACKED_ROWS = 4


def grouped_weight(parts: Sequence[GroupedInts], placement: Placement) -> LinearWeight:
    """The fastest form of matrices stacked by rows."""
    if any(not part.is_like(parts[0]) for part in parts):
        return StackedWeights([grouped_weight([part], placement) for part in parts])
    stacked = replace(
        parts[0],
        numbers=torch.cat([part.numbers for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        offsets=torch.cat([part.offsets for part in parts]),
    )
    if can_pack_for_cpu(stacked, placement):
        return _in_order(CpuInt4Weight(stacked), stacked.order)
    if can_pack_for_gpu(stacked, placement):
        return _in_order(GpuInt4Weight(stacked, placement), _moved(stacked.order, placement))
    return dense_weight(stacked.dequantized().to(placement.device, placement.dtype))


def _moved(order: torch.Tensor | None, placement: Placement) -> torch.Tensor | None:
    return None if order is None else order.to(placement.device)


def can_pack_for_cpu(ints: GroupedInts, placement: Placement) -> bool:
    """Whether `CpuInt4Weight` takes this matrix: it is slow in other precisions than bfloat16."""
    return (
        placement.device.type == "cpu"
        and placement.dtype is torch.bfloat16
        and HAS_ONEDNN
        and ints.bits == 4
        and ints.group_size in CPU_GROUP_SIZES
        and ints.out_features % 16 == 0
    )


class CpuInt4Weight:
    """Four bits for a few rows, prepacked bf16 for many: decoding is bound by memory, prefill by arithmetic.

    Scales and offsets are rounded to bfloat16, as the packed product takes them.
    """

    def __init__(self, ints: GroupedInts) -> None:
        # PyTorch's formula is (number - 8) * scale + offset.
        pairs = torch.stack((ints.scales, ints.offsets + 8.0 * ints.scales), dim=-1)
        self._scales_and_offsets = pairs.transpose(0, 1).contiguous().bfloat16()
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(ints.numbers.to(torch.int32), 1)
        self._group_size = ints.group_size
        self._dense = PrepackedWeight(replace(ints, order=None).dequantized().bfloat16())

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if x.shape[0] > MAX_PACKED_ROWS:
            return self._dense.apply(x, bias)
        out = torch._weight_int4pack_mm_for_cpu(x, self._packed, self._group_size, self._scales_and_offsets)
        return out if bias is None else out + bias


class Reordered:
    """A matrix whose columns are in another order than its input's (GPTQ's activation order)."""

    def __init__(self, weight: LinearWeight, order: torch.Tensor) -> None:
        self._weight = weight
        self._order = order

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self._weight.apply(x.index_select(1, self._order), bias)


def _in_order(weight: LinearWeight, order: torch.Tensor | None) -> LinearWeight:
    return weight if order is None else Reordered(weight, order)
