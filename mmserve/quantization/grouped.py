"""The forms in which grouped numbers are held and multiplied."""

from collections.abc import Sequence

import torch

from mmserve.quantization.cpu_few_rows import FewRowsWeight, can_multiply_few_rows
from mmserve.quantization.cpu_int4 import CpuInt4Weight, can_pack_for_cpu
from mmserve.quantization.dense import dense_weight
from mmserve.quantization.gpu_int4 import GpuInt4Weight, can_pack_for_gpu
from mmserve.quantization.grouped_ints import GroupedInts
from mmserve.quantization.scheme import LinearWeight, Placement, StackedWeights


def grouped_weight(parts: Sequence[GroupedInts], placement: Placement) -> LinearWeight:
    """The fastest form of matrices stacked by rows."""
    if any(not part.is_like(parts[0]) for part in parts):
        return StackedWeights([grouped_weight([part], placement) for part in parts])
    stacked = GroupedInts.stacked(parts)
    if can_multiply_few_rows(stacked, placement):
        return _in_order(FewRowsWeight(stacked, keeps_copy=placement.keeps_copy), stacked.order)
    if can_pack_for_cpu(stacked, placement):
        return _in_order(CpuInt4Weight(stacked), stacked.order)
    if can_pack_for_gpu(stacked, placement):
        return _in_order(GpuInt4Weight(stacked, placement), _moved(stacked.order, placement))
    return dense_weight(stacked.dequantized().to(placement.device, placement.dtype))


def _moved(order: torch.Tensor | None, placement: Placement) -> torch.Tensor | None:
    return None if order is None else order.to(placement.device)


class Reordered:
    """A matrix whose columns are in another order than its input's (GPTQ's activation order)."""

    def __init__(self, weight: LinearWeight, order: torch.Tensor) -> None:
        self._weight = weight
        self._order = order.to(torch.int32)

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self._weight.apply(x.index_select(1, self._order), bias)


def _in_order(weight: LinearWeight, order: torch.Tensor | None) -> LinearWeight:
    return weight if order is None else Reordered(weight, order)
