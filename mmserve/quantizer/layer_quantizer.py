"""One decoder layer, from its weights and what is known of its inputs to quantized matrices."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from mmserve.config import ModelConfig
from mmserve.quantization.bits import pack
from mmserve.quantization.eight_bit import to_numbers
from mmserve.quantization.grouped_ints import GroupedInts
from mmserve.quantizer.awq import by_kv_head, of_kv_heads, search_scales
from mmserve.quantizer.block import INPUTS, MATRICES, Tensors
from mmserve.quantizer.gptq import gptq
from mmserve.quantizer.rounding import GroupForm, clipped_ranges, round_to_nearest
from mmserve.quantizer.settings import NUM_BITS, QuantizeSettings
from mmserve.quantizer.statistics import InputStatistics

_FP8_MAX, _INT8_MAX = 448.0, 127.0
# Queries and keys meet in a product, where a clipped weight may shift every score.
_UNCLIPPED = frozenset({"self_attn.q_proj", "self_attn.k_proj"})


@dataclass
class QuantizedLayer:
    """`stored` is what a compressed-tensors file holds; `computed` the layer that it stands for, float32.

    Names are those inside the layer, as `self_attn.q_proj.weight`.
    """

    stored: Tensors = field(default_factory=dict)
    computed: Tensors = field(default_factory=dict)


def quantize_layer(
    tensors: Tensors,
    statistics: Mapping[str, InputStatistics],
    config: ModelConfig,
    settings: QuantizeSettings,
    dtype: torch.dtype,
) -> QuantizedLayer:
    """`tensors` float32 by their names in the layer; `statistics` by `INPUTS`, which only calibrated schemes need.

    `dtype` is the precision of what stays as it is, and of scales.
    """
    if settings.scheme == "awq":
        tensors, statistics = _scaled(dict(tensors), dict(statistics), config, _form(settings, dtype))
    layer = QuantizedLayer()
    for name, tensor in tensors.items():
        if name.removesuffix(".weight") not in MATRICES:
            layer.stored[name] = tensor.to(dtype)
            layer.computed[name] = layer.stored[name].float()
    for group, names in INPUTS.items():
        for name in names:
            weight = tensors[f"{name}.weight"]
            if settings.is_grouped:
                ints = _grouped(name, weight, statistics.get(group), settings, _form(settings, dtype))
                stored, computed = _packed(ints, settings, dtype), ints.dequantized()
            else:
                stored, computed = _eight_bits(weight, settings, dtype)
            layer.stored.update({f"{name}.{part}": tensor for part, tensor in stored.items()})
            layer.computed[f"{name}.weight"] = computed
    return layer


def _form(settings: QuantizeSettings, dtype: torch.dtype) -> GroupForm:
    return GroupForm(NUM_BITS, settings.group_size, settings.symmetric, dtype)


def _grouped(
    name: str, weight: torch.Tensor, known: InputStatistics | None, settings: QuantizeSettings, form: GroupForm
) -> GroupedInts:
    if known is None:
        return round_to_nearest(weight, form)
    if settings.scheme == "gptq":
        return gptq(weight, known.gram, form, damping=settings.damping, act_order=settings.act_order)
    if name in _UNCLIPPED:
        return round_to_nearest(weight, form)
    scales, zeros = clipped_ranges(weight, known.gram, form)
    return form.ints(form.numbers(form.grouped(weight), scales, zeros), scales, zeros)


def _scaled(
    tensors: Tensors, statistics: dict[str, InputStatistics], config: ModelConfig, form: GroupForm
) -> tuple[Tensors, dict[str, InputStatistics]]:
    """AWQ's equivalent layer: each input's factors go into the norm or the matrix that it comes from."""
    heads = (config.num_heads, config.num_kv_heads)
    sources: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
        "attention": ("input_layernorm", _as_it_is, _as_it_is),
        "attention_output": ("self_attn.v_proj", by_kv_head(*heads), _kv_heads_of(*heads)),
        "feed_forward": ("post_attention_layernorm", _as_it_is, _as_it_is),
        "feed_forward_output": ("mlp.up_proj", _as_it_is, _as_it_is),
    }
    for group, (source, shared, as_source) in sources.items():
        names = [f"{name}.weight" for name in INPUTS[group]]
        known = statistics[group]
        scales = search_scales([tensors[name] for name in names], known.gram, known.magnitudes, form, shared)
        tensors.update({name: tensors[name] * scales for name in names})
        for name in (f"{source}.weight", f"{source}.bias"):
            if name in tensors:
                rows = as_source(scales)
                tensors[name] = tensors[name] / (rows if tensors[name].ndim == 1 else rows[:, None])
        statistics[group] = known.unscaled(scales)
    return tensors, statistics


def _as_it_is(scales: torch.Tensor) -> torch.Tensor:
    return scales


def _kv_heads_of(num_heads: int, num_kv_heads: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return partial(of_kv_heads, num_heads=num_heads, num_kv_heads=num_kv_heads)


def _packed(ints: GroupedInts, settings: QuantizeSettings, dtype: torch.dtype) -> Tensors:
    """compressed-tensors' `pack-quantized`."""
    stored = {
        "weight_packed": pack(ints.numbers, ints.bits),
        "weight_scale": ints.scales.to(dtype),
        "weight_shape": torch.tensor(ints.numbers.shape),
    }
    if not settings.symmetric:
        zeros = (-ints.offsets / ints.scales).round().to(torch.uint8)
        stored["weight_zero_point"] = pack(zeros.T.contiguous(), ints.bits).T.contiguous()
    return stored


def _eight_bits(weight: torch.Tensor, settings: QuantizeSettings, dtype: torch.dtype) -> tuple[Tensors, torch.Tensor]:
    """`float-quantized` and `int-quantized`: a scale for each row."""
    is_float = settings.scheme == "fp8"
    largest = weight.abs().amax(dim=1, keepdim=True)
    scales = (largest / (_FP8_MAX if is_float else _INT8_MAX)).clamp(min=torch.finfo(dtype).smallest_normal).to(dtype)
    numbers = to_numbers(weight, scales.float(), "fp8" if is_float else "int8")
    return {"weight": numbers, "weight_scale": scales}, numbers.float() * scales.float()
