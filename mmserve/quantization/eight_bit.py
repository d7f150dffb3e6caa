"""Eight bits for weights and activations: FP8 (E4M3, Micikevicius et al. 2022, arXiv 2209.05433) and INT8.

An output is `sum(q_x * q_w) * x_scale * w_scale`. Activations are quantized to a scale of their own for each row
(dynamic), or to one that the checkpoint brings (static).
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F

from mmserve.errors import SetupError
from mmserve.kernels.cpu import widen
from mmserve.quantization.dense import dense_weight
from mmserve.quantization.scheme import LinearWeight, Placement, TensorSource, has_fp8_products

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
INT8_MAX = 127.0
# Up to so many rows our own product is faster than PyTorch's of FP8. Llama-2-7B's layers, 1, 16 and 64 rows: 60, 63 and
# 76 us beside 95, 94 and 96 (one H200); INT8 takes the same, and 145 by PyTorch's for 64 rows.
MAX_FEW_ROWS = 64
# Of the sizes of a matrix, for PyTorch's products.
_INT8_STEP_ON_GPU = 8
_FP8_STEP_ON_GPU = 16
# Rows of a matrix that are widened at a time; they stay in a core's cache.
_PIECE = 256


@dataclass(frozen=True)
class EightBitMatrix:
    """`weight[o, i] = numbers[o, i] * scales[o]`; `numbers` `[out, in]` FP8 or int8, `scales` float32 `[out, 1]`.

    `input_scale`, a float32 scalar, is that of static activations; without it they are dynamic. `quantizes_input=False`
    leaves activations as they are.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    input_scale: torch.Tensor | None = None
    quantizes_input: bool = True


def stored_numbers(source: TensorSource, module: str, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """The numbers of a matrix. `SetupError` where they are of another kind than the configuration says."""
    numbers = source.take(f"{module}.weight", shape)
    if numbers.dtype is not dtype:
        found, wanted = (str(kind).removeprefix("torch.") for kind in (numbers.dtype, dtype))
        raise SetupError(
            "model_unavailable",
            f"weight {module}.weight is stored as {found}, but the checkpoint's quantization_config says {wanted}",
        )
    return numbers


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
    """The fastest form of a matrix on its device."""
    moved = replace(
        matrix,
        numbers=matrix.numbers.to(placement.device),
        scales=matrix.scales.to(placement.device, torch.float32),
        input_scale=None if matrix.input_scale is None else matrix.input_scale.to(placement.device, torch.float32),
    )
    if moved.quantizes_input and _can_multiply_on_gpu(moved.numbers):
        return GpuEightBitWeight(moved)
    if moved.quantizes_input and moved.numbers.dtype is torch.int8 and placement.device.type == "cpu":
        return CpuInt8Weight(moved)
    return WidenedWeight(moved, placement)


def _can_multiply_on_gpu(numbers: torch.Tensor) -> bool:
    if numbers.dtype is FP8:
        return has_fp8_products(numbers.device) and all(size % _FP8_STEP_ON_GPU == 0 for size in numbers.shape)
    return numbers.device.type == "cuda" and all(size % _INT8_STEP_ON_GPU == 0 for size in numbers.shape)


def _kind_of(numbers: torch.Tensor) -> Literal["fp8", "int8"]:
    return "fp8" if numbers.dtype is FP8 else "int8"


class GpuEightBitWeight:
    """The card's own products, scaled by row and column: ours for a few rows, PyTorch's for many."""

    def __init__(self, matrix: EightBitMatrix) -> None:
        from mmserve.kernels.eight_bit_matmul import eight_bit_matmul
        from mmserve.kernels.quantize_rows import quantize_rows

        self._quantize_rows, self._few_rows_product = quantize_rows, eight_bit_matmul
        self._numbers = matrix.numbers.contiguous()
        self._scales = matrix.scales.flatten().contiguous()
        self._input_scale = matrix.input_scale

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self._input_scale is None:
            numbers, scales = self._quantize_rows(x, self._numbers.dtype)
        else:
            scales = self._input_scale.expand(x.shape[0])[:, None].contiguous()
            numbers = to_numbers(x, scales, _kind_of(self._numbers))
        if x.shape[0] <= MAX_FEW_ROWS:
            out = self._few_rows_product(numbers, scales, self._numbers, self._scales, x.dtype)
        else:
            out = self._many_rows_product(numbers, scales).to(x.dtype)
        return out if bias is None else out + bias

    def _many_rows_product(self, numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        if numbers.dtype is torch.int8:
            return torch._int_mm(numbers, self._numbers.T).float() * scales * self._scales
        # With scales by rows this product comes in bfloat16 alone.
        product: torch.Tensor = torch._scaled_mm(
            numbers,
            self._numbers.T,
            scale_a=scales,
            scale_b=self._scales[None],
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        return product


class CpuInt8Weight:
    """PyTorch's own product of int8 numbers, whose sums are exact."""

    def __init__(self, matrix: EightBitMatrix) -> None:
        self._matrix = matrix
        self._row_scales = matrix.scales.T.contiguous()

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        numbers, scales = _quantized(x, self._matrix, "int8")
        out = (torch._int_mm(numbers, self._matrix.numbers.T).float() * scales * self._row_scales).to(x.dtype)
        return out if bias is None else out + bias


class WidenedWeight:
    """The numbers in the precision of computation: in a copy that is multiplied instead, or piece by piece.

    Sums of unscaled numbers do not fit into float16: there they are float32.
    """

    def __init__(self, matrix: EightBitMatrix, placement: Placement) -> None:
        self._matrix = matrix
        self._row_scales = matrix.scales.T.contiguous()
        self._dense: LinearWeight | None = None
        self._dtype = placement.dtype if placement.dtype is not torch.float16 else torch.float32
        if placement.device.type == "cpu" and placement.keeps_copy and self._dtype is placement.dtype:
            self._dense = dense_weight(widen(matrix.numbers, placement.dtype))
            # Not a slice, which would keep all of them.
            self._matrix = replace(matrix, numbers=matrix.numbers.new_empty(0))
        self._kind = _kind_of(matrix.numbers)

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows, scales = x.to(self._dtype), None
        if self._matrix.quantizes_input:
            numbers, scales = _quantized(x, self._matrix, self._kind)
            rows = widen(numbers, self._dtype)
        product = self._product(rows).float()
        out = ((product if scales is None else product * scales) * self._row_scales).to(x.dtype)
        return out if bias is None else out + bias

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if self._dense is not None:
            return self._dense.apply(x, None)
        numbers = self._matrix.numbers
        if x.device.type != "cpu":
            return x @ numbers.to(x.dtype).T
        return torch.cat([F.linear(x, widen(piece, x.dtype)) for piece in torch.split(numbers, _PIECE)], dim=1)


def _quantized(
    x: torch.Tensor, matrix: EightBitMatrix, kind: Literal["fp8", "int8"]
) -> tuple[torch.Tensor, torch.Tensor]:
    if matrix.input_scale is None:
        return quantize_rows(x, kind)
    return to_numbers(x, matrix.input_scale, kind), matrix.input_scale
