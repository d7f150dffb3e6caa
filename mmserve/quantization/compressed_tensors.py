"""Checkpoints of the `compressed-tensors` format: W4A16 and its kin, W8A8 in FP8 and in INT8.

`pack-quantized`: `weight_packed` int32 `[out, in * bits / 32]` of `number + 2 ** (bits - 1)`, `weight_scale`
`[out, groups]`, `weight_zero_point` int32 `[out * bits / 32, groups]` packed likewise, `weight_g_idx` int32 `[in]`.
`float-quantized`, `int-quantized`, `naive-quantized`: `weight` `[out, in]`, `weight_scale` one, `[out, 1]` or, by
blocks, `[out / rows, in / columns]`.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch

from mmserve.errors import SetupError
from mmserve.quantization.bits import num_words, unpack
from mmserve.quantization.block_fp8 import BlockMatrix, block_weight
from mmserve.quantization.eight_bit import FP8, EightBitMatrix, eight_bit_weight, stacked, stored_numbers
from mmserve.quantization.fp8 import flexible_scales
from mmserve.quantization.gptq import columns_by_group
from mmserve.quantization.grouped import grouped_weight
from mmserve.quantization.grouped_ints import GroupedInts
from mmserve.quantization.scheme import LinearSpec, LinearWeight, Placement, StackedWeights, TensorSource


class CompressedTensorsScheme:
    def __init__(self, config: Mapping[str, Any]) -> None:
        """`config` is the checkpoint's `quantization_config`. Raises `SetupError` for a layout that is not served."""
        self._groups = [_Group(group, config.get("format")) for group in config.get("config_groups", {}).values()]
        if not self._groups:
            raise SetupError("model_unavailable", "the checkpoint's quantization_config has no config_groups")
        if config.get("transform_config"):
            raise SetupError(
                "model_unavailable",
                "the checkpoint's matrices are for transformed inputs (transform_config), which is not served",
            )

    def load(self, spec: LinearSpec, source: TensorSource, placement: Placement) -> LinearWeight | None:
        name = spec.names[0]
        if not source.has(f"{name}.weight_scale"):
            return None
        groups = [self._group_of(one) for one in spec.names]
        group, sizes = groups[0], list(zip(spec.names, spec.out_features, strict=True))
        if any(other is not group for other in groups):
            singles = [LinearSpec((one,), spec.in_features, (size,)) for one, size in sizes]
            loaded = [self.load(single, source, placement) for single in singles]
            return StackedWeights([weight for weight in loaded if weight is not None])
        if source.has(f"{name}.weight_packed"):
            return grouped_weight([group.ints(one, spec.in_features, size, source) for one, size in sizes], placement)
        if group.block is not None:
            return block_weight([group.blocks(one, spec.in_features, size, source) for one, size in sizes], placement)
        return eight_bit_weight(
            stacked([group.matrix(one, spec.in_features, size, source) for one, size in sizes]), placement
        )

    def _group_of(self, module: str) -> "_Group":
        return next((group for group in self._groups if group.names(module)), self._groups[0])


class _Group:
    """The layers of a checkpoint that are quantized alike."""

    def __init__(self, group: Mapping[str, Any], stored: str | None) -> None:
        weights, inputs = group["weights"], group.get("input_activations") or {}
        self._targets = tuple(map(str, group.get("targets", ())))
        self._bits = int(weights["num_bits"])
        self._kind = str(weights.get("type", "int"))
        self._is_symmetric = bool(weights.get("symmetric", True))
        self._group_size = weights.get("group_size") or -1
        self._quantizes_input = bool(inputs)
        self._is_static = bool(inputs) and not inputs.get("dynamic", False)
        strategy = weights.get("strategy", "group" if self._group_size > 0 else "channel")
        block = weights.get("block_structure") if strategy == "block" and self._kind == "float" else None
        self.block: tuple[int, int] | None = (int(block[0]), int(block[1])) if block else None
        is_eight_bit = self._bits == 8 and (strategy in ("tensor", "channel") or self.block is not None)
        is_grouped = self._kind == "int" and self._bits in (2, 3, 4, 8) and strategy in ("group", "channel")
        if not (is_eight_bit or is_grouped) or (inputs and not self._can_round(inputs)):
            raise SetupError(
                "model_unavailable",
                f"compressed-tensors weights of {self._bits} bits ({self._kind}, {strategy}, format {stored}) with"
                " these activations are not served: W4A16, W8A16, and W8A8 in FP8 and INT8 are",
            )

    def _can_round(self, inputs: Mapping[str, Any]) -> bool:
        """Whether activations are of the same eight bits as the weights."""
        is_like_weights = (inputs.get("type", self._kind), inputs.get("num_bits", 8)) == (self._kind, self._bits)
        return is_like_weights and self._bits == 8 and bool(inputs.get("symmetric", True))

    def names(self, module: str) -> bool:
        """Whether a target means this module: its class, its name or the end of it, or a pattern after `re:`."""
        for target in self._targets:
            if target == "Linear" or module.endswith(target):
                return True
            if target.startswith("re:") and re.match(target[3:], module):
                return True
        return False

    def ints(self, name: str, in_features: int, out_features: int, source: TensorSource) -> GroupedInts:
        group_size = in_features if self._group_size == -1 else self._group_size
        num_groups = in_features // group_size
        source.ignore(f"{name}.weight_shape")
        words = source.take(f"{name}.weight_packed", (out_features, num_words(in_features, self._bits)))
        scales = source.take(f"{name}.weight_scale", (out_features, num_groups))
        zeros = torch.full(scales.shape, float(1 << (self._bits - 1)), device=scales.device)
        if not self._is_symmetric:
            packed = source.take(f"{name}.weight_zero_point", (num_words(out_features, self._bits), num_groups))
            zeros = unpack(packed.T.contiguous(), self._bits, out_features).T.float().contiguous()
        numbers = unpack(words, self._bits, in_features)
        order = None
        if source.has(f"{name}.weight_g_idx"):
            order = columns_by_group(source.take(f"{name}.weight_g_idx", (in_features,)), group_size, name)
            numbers = numbers if order is None else numbers.index_select(1, order)
        return GroupedInts.with_zeros(numbers, scales, zeros, bits=self._bits, group_size=group_size, order=order)

    def blocks(self, name: str, in_features: int, out_features: int, source: TensorSource) -> BlockMatrix:
        assert self.block is not None
        shape = (-(-out_features // self.block[0]), -(-in_features // self.block[1]))
        numbers = stored_numbers(source, name, (out_features, in_features), FP8)
        return BlockMatrix(numbers, source.take(f"{name}.weight_scale", shape).float(), self.block)

    def matrix(self, name: str, in_features: int, out_features: int, source: TensorSource) -> EightBitMatrix:
        if not self._is_symmetric:
            raise SetupError(
                "model_unavailable", f"{name} has eight bits with zero points, which are served in pack-quantized alone"
            )
        dtype = FP8 if self._kind == "float" else torch.int8
        numbers = stored_numbers(source, name, (out_features, in_features), dtype)
        source.ignore(f"{name}.weight_zero_point")
        input_scale = source.take_any(f"{name}.input_scale").float().max() if self._is_static else None
        scales = flexible_scales(source, f"{name}.weight_scale", out_features)
        return EightBitMatrix(numbers, scales, input_scale, self._quantizes_input)
