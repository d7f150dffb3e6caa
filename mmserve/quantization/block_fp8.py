"""FP8 matrices with one scale for each block, of 128 x 128 as a rule (DeepSeek-V3, Liu et al. 2024)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from mmserve.kernels.cpu import widen
from mmserve.quantization.dense import dense_weight
from mmserve.quantization.scheme import LinearWeight, Placement, StackedWeights, has_fp8_products

# What the kernel takes.
_KERNEL_COLUMNS, _KERNEL_ROWS = 128, 64
_PIECE = 256


@dataclass(frozen=True)
class BlockMatrix:
    """`weight[o, i] = numbers[o, i] * scales[o // block[0], i // block[1]]`; FP8 `[out, in]`, float32 scales."""

    numbers: torch.Tensor
    scales: torch.Tensor
    block: tuple[int, int]

    def dequantized(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """Rows `start` to `stop`; the product with a scale is rounded once."""
        rows = torch.arange(start, stop, device=self.scales.device) // self.block[0]
        scales = self.scales[rows].repeat_interleave(self.block[1], dim=1)[:, : self.numbers.shape[1]]
        return (widen(self.numbers[start:stop], dtype).float() * scales).to(dtype)


def block_weight(parts: list[BlockMatrix], placement: Placement) -> LinearWeight:
    """The fastest form of matrices of the same input, stacked by rows."""
    device = placement.device
    moved = [BlockMatrix(part.numbers.to(device), part.scales.to(device), part.block) for part in parts]
    if device.type == "cpu" and placement.keeps_copy:
        return dense_weight(torch.cat([part.dequantized(0, len(part.numbers), placement.dtype) for part in moved]))
    block = moved[0].block
    if any(len(part.numbers) % block[0] for part in moved[:-1]):
        return StackedWeights([block_weight([part], placement) for part in parts])
    stacked = BlockMatrix(
        torch.cat([part.numbers for part in moved]), torch.cat([part.scales for part in moved]), block
    )
    can_multiply = block[1] == _KERNEL_COLUMNS and block[0] % _KERNEL_ROWS == 0
    if has_fp8_products(device) and can_multiply and stacked.numbers.shape[1] % _KERNEL_COLUMNS == 0:
        return GpuBlockWeight(stacked)
    return UnpackedBlockWeight(stacked)


class GpuBlockWeight:
    """Our own product, in which x is quantized to 128 columns a scale."""

    def __init__(self, matrix: BlockMatrix) -> None:
        from mmserve.kernels.eight_bit_matmul import fp8_block_matmul

        self._multiply = fp8_block_matmul
        self._matrix = matrix

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = self._multiply(x, self._matrix.numbers, self._matrix.scales, self._matrix.block[0])
        return out if bias is None else out + bias


class UnpackedBlockWeight:
    """Unpacked piece by piece for each call; x stays as it is, which is the more exact."""

    def __init__(self, matrix: BlockMatrix) -> None:
        self._matrix = matrix

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        num_rows = len(self._matrix.numbers)
        pieces = [(start, min(start + _PIECE, num_rows)) for start in range(0, num_rows, _PIECE)]
        outs = [F.linear(x, self._matrix.dequantized(start, stop, x.dtype)) for start, stop in pieces]
        out = torch.cat(outs, dim=1)
        return out if bias is None else out + bias
