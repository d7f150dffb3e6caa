"""Four bits on a GPU: our own product for some rows, and PyTorch's on an unpacked copy for many."""

import torch
import torch.nn.functional as F

from mmserve.quantization.grouped_ints import GroupedInts
from mmserve.quantization.scheme import Placement

# What the kernel's tiles take; larger groups are whole tiles.
_SMALL_GROUPS = (16, 32, 64)
_TILE_COLUMNS = 128
# From so many rows on, unpacking the matrix for a call is cheaper than a product that unpacks as it goes.
MAX_PACKED_ROWS = 512


def can_pack_for_gpu(ints: GroupedInts, placement: Placement) -> bool:
    """Whether `GpuInt4Weight` takes this matrix."""
    return (
        placement.device.type == "cuda"
        and placement.dtype in (torch.bfloat16, torch.float16)
        and ints.bits == 4
        and (ints.group_size in _SMALL_GROUPS or ints.group_size % _TILE_COLUMNS == 0)
    )


class GpuInt4Weight:
    """Scales and offsets are rounded to the precision of computation."""

    def __init__(self, ints: GroupedInts, placement: Placement) -> None:
        from mmserve.kernels import int4_matmul

        self._kernels = int4_matmul
        self._group_size = ints.group_size
        self._num_columns = ints.numbers.shape[1]
        scales = ints.scales.to(placement.device)
        offsets = ints.offsets.to(placement.device) + int4_matmul.MIDDLE * scales
        self._words = int4_matmul.tile_int4(ints.numbers.to(placement.device))
        self._scales = scales.T.to(placement.dtype).contiguous()
        self._offsets = offsets.T.to(placement.dtype).contiguous() if bool(offsets.any()) else None

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if x.shape[0] > MAX_PACKED_ROWS:
            weight = self._kernels.dequantize_int4(
                self._words, self._scales, self._offsets, self._group_size, self._num_columns, x.dtype
            )
            return F.linear(x, weight, bias)
        out = self._kernels.int4_matmul(x, self._words, self._scales, self._offsets, self._group_size)
        return out if bias is None else out + bias
