"""Eight bits for weights and activations: FP8 (E4M3, Micikevicius et al. 2022, arXiv 2209.05433) and INT8.

An output is `sum(q_x * q_w) * x_scale * w_scale`. Activations are quantized to a scale of their own for each row
(dynamic), or to one that the checkpoint brings (static).
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch

from mmserve.quantization.scheme import LinearWeight, Placement

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
INT8_MAX = 127.0


@dataclass(frozen=True)
class EightBitMatrix:
    """`weight[o, i] = numbers[o, i] * scales[o]`; `numbers` `[out, in]` FP8 or int8, `scales` float32 `[out, 1]`.

    `input_scale`, a float32 scalar, is that of static activations; without it they are dynamic. With `zero_points` int8
    activations are `number - zero_point`. `quantizes_input=False` leaves activations as they are.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    input_scale: torch.Tensor | None = None
    quantizes_input: bool = True

    @property
    def max_number(self) -> float:
        return FP8_MAX if self.numbers.dtype is FP8 else INT8_MAX


def stacked(parts: list[EightBitMatrix]) -> EightBitMatrix:
    """Matrices of one input by rows. Static scales may differ: the largest covers all."""
    scales = [part.input_scale for part in parts]
    known = [scale for scale in scales if scale is not None]
    return EightBitMatrix(
        torch.cat([part.numbers for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.stack(known).amax() if len(known) == len(parts) else None,
        parts[0].quantizes_input,
    )


def quantize_rows(x: torch.Tensor, kind: Literal["fp8", "int8"]) -> tuple[torch.Tensor, torch.Tensor]:
    """x `[rows, columns]` -> numbers and float32 scales `[rows, 1]`, the largest of a row at the end of the range."""
    largest = x.float().abs().amax(dim=-1, keepdim=True)
    scales = (largest / (FP8_MAX if kind == "fp8" else INT8_MAX)).clamp(min=1e-12)
    return to_numbers(x, scales, kind), scales


def to_numbers(x: torch.Tensor, scales: torch.Tensor, kind: Literal["fp8", "int8"]) -> torch.Tensor:
    scaled = x.float() / scales
    if kind == "fp8":
        return scaled.clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return scaled.round().clamp(-INT8_MAX - 1, INT8_MAX).to(torch.int8)


def eight_bit_weight(matrix: EightBitMatrix, placement: Placement) -> LinearWeight:
    moved = replace(
        matrix,
        numbers=matrix.numbers.to(placement.device),
        scales=matrix.scales.to(placement.device, torch.float32),
        input_scale=None if matrix.input_scale is None else matrix.input_scale.to(placement.device, torch.float32),
    )
    if placement.device.type == "cuda" and moved.numbers.dtype is FP8 and moved.quantizes_input:
        return GpuFp8Weight(moved)
    return EightBitWeight(moved)


class GpuFp8Weight:
    """The card's own product of FP8 numbers (PyTorch's `_scaled_mm`, scales by row and column)."""

    def __init__(self, matrix: EightBitMatrix) -> None:
        from mmserve.kernels.quantize_rows import quantize_rows

        self._quantize_rows = quantize_rows
        self._numbers = matrix.numbers.contiguous()
        self._scales = matrix.scales.T.contiguous()
        self._input_scale = matrix.input_scale

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self._input_scale is None:
            numbers, scales = self._quantize_rows(x)
        else:
            scales = self._input_scale.expand(x.shape[0])[:, None].contiguous()
            numbers = to_numbers(x, scales, "fp8")
        out: torch.Tensor = torch._scaled_mm(
            numbers, self._numbers.T, scale_a=scales, scale_b=self._scales, out_dtype=x.dtype, use_fast_accum=True
        )
        return out if bias is None else out + bias


class EightBitWeight:
    """The formula in PyTorch's own products; on a CPU the numbers are widened for each call."""

    def __init__(self, matrix: EightBitMatrix) -> None:
        self._matrix = matrix
        self._kind: Literal["fp8", "int8"] = "fp8" if matrix.numbers.dtype is FP8 else "int8"

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        matrix = self._matrix
        weight = matrix.numbers.to(x.dtype)
        if not matrix.quantizes_input:
            out = (x @ weight.T).float() * matrix.scales.T
        else:
            if matrix.input_scale is None:
                numbers, scales = quantize_rows(x, self._kind)
            else:
                scales = matrix.input_scale
                numbers = to_numbers(x, scales, self._kind)
            out = (numbers.to(x.dtype) @ weight.T).float() * scales * matrix.scales.T
        out = out.to(x.dtype)
        return out if bias is None else out + bias
