"""One decoder layer, from its weights and what is known of its inputs to quantized matrices."""

from collections.abc import Callable, Container
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch

from mmserve.config import ModelConfig
from mmserve.quantization.bits import pack
from mmserve.quantization.eight_bit import FP8, quantize_rows
from mmserve.quantizer.awq import by_kv_head, of_kv_heads, search_scales
from mmserve.quantizer.block import INPUTS, Rounding, Tensors, as_it_is
from mmserve.quantizer.drift import corrected
from mmserve.quantizer.gptq import gptq
from mmserve.quantizer.inputs import LayerInputs
from mmserve.quantizer.rounding import (
    Form,
    GroupForm,
    RoundedMatrix,
    RowForm,
    round_in_best_ranges,
    round_to_nearest,
)
from mmserve.quantizer.settings import NUM_BITS, QuantizeSettings, SchemeName
from mmserve.quantizer.statistics import InputStatistics

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
    inputs: LayerInputs | None,
    config: ModelConfig,
    settings: QuantizeSettings,
    dtype: torch.dtype,
    *,
    kept: Container[str] = (),
) -> QuantizedLayer:
    """`tensors` float32 by their names in the layer; `inputs` only where there are calibration samples.

    `dtype` is the precision of what stays as it is, as the groups `kept` of `INPUTS` do, and of scales.
    """
    form = form_of(settings, dtype)
    statistics: dict[str, InputStatistics] = {}
    if settings.scheme == "awq":
        assert inputs is not None
        tensors, statistics = _scaled(dict(tensors), dict(inputs.of_unquantized()), config, form)
    layer = QuantizedLayer(computed=dict(tensors))
    rounded_names = {name for group, names in INPUTS.items() if group not in kept for name in names}
    for name, tensor in tensors.items():
        if name.removesuffix(".weight") not in rounded_names:
            layer.stored[name] = tensor.to(dtype)
            layer.computed[name] = layer.stored[name].float()
    for group, names in INPUTS.items():
        known = statistics.get(group)
        if inputs is not None and known is None:
            known = inputs.of_next(layer.computed)
        for name in names if group not in kept else ():
            rounded = _rounded(name, tensors[f"{name}.weight"], known, settings, form)
            layer.stored.update({f"{name}.{part}": tensor for part, tensor in _stored(rounded, form).items()})
            layer.computed[f"{name}.weight"] = rounded.dequantized()
    return layer


def form_of(settings: QuantizeSettings, dtype: torch.dtype) -> GroupForm | RowForm:
    if settings.scheme == "fp8" or settings.scheme == "int8":
        return RowForm(settings.scheme, dtype)
    return GroupForm(NUM_BITS, settings.group_size, settings.symmetric, dtype)


def input_rounding(scheme: SchemeName) -> Rounding:
    """What happens to matrices' inputs when the model runs."""
    if scheme == "fp8" or scheme == "int8":
        return partial(_rounded_inputs, kind=scheme)
    return as_it_is


def _rounded_inputs(x: torch.Tensor, kind: Literal["fp8", "int8"]) -> torch.Tensor:
    numbers, scales = quantize_rows(x, kind)
    return numbers.float() * scales


def _rounded(
    name: str, weight: torch.Tensor, known: InputStatistics | None, settings: QuantizeSettings, form: Form
) -> RoundedMatrix:
    if known is None:
        return round_to_nearest(weight, form)
    if settings.scheme == "awq":
        if name in _UNCLIPPED:
            return round_to_nearest(weight, form)
        return round_in_best_ranges(weight, known.gram, form)
    wanted = corrected(weight, known)
    return gptq(wanted, known.gram, form, damping=settings.damping, act_order=settings.act_order)


def _scaled(
    tensors: Tensors, statistics: dict[str, InputStatistics], config: ModelConfig, form: Form
) -> tuple[Tensors, dict[str, InputStatistics]]:
    """AWQ's equivalent layer: each input's factors go into the norm or the matrix that it comes from."""
    heads = (config.num_heads, config.num_kv_heads)
    sources: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
        "attention": ("input_layernorm", as_it_is, as_it_is),
        "attention_output": ("self_attn.v_proj", by_kv_head(*heads), _kv_heads_of(*heads)),
        "feed_forward": ("post_attention_layernorm", as_it_is, as_it_is),
        "feed_forward_output": ("mlp.up_proj", as_it_is, as_it_is),
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


def _kv_heads_of(num_heads: int, num_kv_heads: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return partial(of_kv_heads, num_heads=num_heads, num_kv_heads=num_kv_heads)


def _stored(rounded: RoundedMatrix, form: GroupForm | RowForm) -> Tensors:
    """compressed-tensors' `pack-quantized`; `float-quantized` and `int-quantized`, a scale for each row."""
    numbers, scales = rounded.numbers.flatten(1), rounded.scales.squeeze(-1).to(form.scale_dtype)
    if isinstance(form, RowForm):
        return {"weight": numbers.to(FP8 if form.kind == "fp8" else torch.int8), "weight_scale": scales}
    stored = {
        "weight_packed": pack(numbers.to(torch.uint8), form.bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(numbers.shape),
    }
    if not form.symmetric:
        zeros = rounded.zeros.squeeze(-1).to(torch.uint8)
        stored["weight_zero_point"] = pack(zeros.T.contiguous(), form.bits).T.contiguous()
    return stored
