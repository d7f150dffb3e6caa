"""FP8 checkpoints (`quant_method: fp8`), and FP8 made of full-precision weights while they are loaded.

`weight` is E4M3 `[out, in]`; `weight_scale` is one number, or one a row. In block-scaled checkpoints
`weight_scale_inv` has one number for each block of, as a rule, 128 x 128. `input_scale` is that of static activations.
"""

from collections.abc import Mapping
from typing import Any

import torch

from mmserve.quantization.block_fp8 import BlockMatrix, block_weight
from mmserve.quantization.eight_bit import FP8, EightBitMatrix, eight_bit_weight, quantize_rows, stacked, stored_numbers
from mmserve.quantization.scheme import LinearSpec, LinearWeight, Placement, TensorSource

# What is quantized without being asked for by name: towers, projectors and heads stay as they are.
_DECODER_LAYERS = "model.layers."


class Fp8Scheme:
    def __init__(self, config: Mapping[str, Any]) -> None:
        """`config` is the checkpoint's `quantization_config`."""
        self._is_static = config.get("activation_scheme") == "static"
        block = config.get("weight_block_size")
        self._block: tuple[int, int] | None = (int(block[0]), int(block[1])) if block else None

    def load(self, spec: LinearSpec, source: TensorSource, placement: Placement) -> LinearWeight | None:
        scale_name = "weight_scale_inv" if self._block else "weight_scale"
        if not source.has(f"{spec.names[0]}.{scale_name}"):
            return None
        sizes = list(zip(spec.names, spec.out_features, strict=True))
        if self._block:
            return block_weight(
                [self._blocks(name, size, spec.in_features, source, self._block) for name, size in sizes], placement
            )
        return eight_bit_weight(
            stacked([self._matrix(name, size, spec.in_features, source) for name, size in sizes]), placement
        )

    def _matrix(self, name: str, out_features: int, in_features: int, source: TensorSource) -> EightBitMatrix:
        numbers = stored_numbers(source, name, (out_features, in_features), FP8)
        scales = flexible_scales(source, f"{name}.weight_scale", out_features)
        input_scale = source.take_any(f"{name}.input_scale").float().max() if self._is_static else None
        return EightBitMatrix(numbers, scales, input_scale)

    def _blocks(
        self, name: str, out_features: int, in_features: int, source: TensorSource, block: tuple[int, int]
    ) -> BlockMatrix:
        numbers = stored_numbers(source, name, (out_features, in_features), FP8)
        shape = (-(-out_features // block[0]), -(-in_features // block[1]))
        return BlockMatrix(numbers, source.take(f"{name}.weight_scale_inv", shape).float(), block)


class Fp8OnTheFly:
    """Weights in full precision, quantized row by row as they are loaded; activations are dynamic."""

    def load(self, spec: LinearSpec, source: TensorSource, placement: Placement) -> LinearWeight | None:
        if not spec.names[0].startswith(_DECODER_LAYERS):
            return None
        parts = []
        for name, size in zip(spec.names, spec.out_features, strict=True):
            weight = source.take(f"{name}.weight", (size, spec.in_features)).to(placement.device)
            parts.append(EightBitMatrix(*quantize_rows(weight, "fp8")))
        return eight_bit_weight(stacked(parts), placement)


def flexible_scales(source: TensorSource, name: str, out_features: int) -> torch.Tensor:
    """One scale for a matrix, or one a row -> float32 `[out, 1]`."""
    scales = source.take_any(name).float().flatten()
    return scales.expand(out_features)[:, None] if scales.numel() == 1 else scales.view(out_features, 1)
