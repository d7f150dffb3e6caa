"""Checkpoints as quantizers write them: the matrices of a full one in each form, and what each form says they are."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from stored_matrices import awq_words, compressed_words, gptq_words

GROUP = 32
BLOCK = 128
FP8 = torch.float8_e4m3fn
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Form:
    """`store` gives the tensors of a matrix by the ends of their names, and the matrix that they stand for.

    `config` is the checkpoint's `quantization_config`.
    """

    store: Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
    config: Mapping[str, Any]


def _grouped(weight: torch.Tensor) -> torch.Tensor:
    return weight.view(weight.shape[0], -1, GROUP)


def _four_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers, float16 scales and zero points in groups, and the matrix that they are. A zero point is at least 1."""
    grouped = _grouped(weight)
    low, high = grouped.amin(dim=2).clamp(max=0.0), grouped.amax(dim=2).clamp(min=0.0)
    scales = ((high - low) / 15).half()
    zeros = (-low / scales.float()).round().clamp(1, 15)
    numbers = ((grouped / scales.float()[:, :, None]).round() + zeros[:, :, None]).clamp(0, 15)
    value = (numbers - zeros[:, :, None]) * scales.float()[:, :, None]
    return numbers.view(weight.shape).to(torch.int64), scales, zeros.to(torch.int64), value.view(weight.shape)


def _awq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    numbers, scales, zeros, value = _four_bits(weight)
    return {"qweight": awq_words(numbers.T), "qzeros": awq_words(zeros.T), "scales": scales.T}, value


def _gptq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    numbers, scales, zeros, value = _four_bits(weight)
    return {
        "qweight": gptq_words(numbers.T.contiguous(), 4),
        "qzeros": gptq_words((zeros - 1).contiguous(), 4).T,
        "scales": scales.T,
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }, value


def _gptq_in_order(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Groups of columns that are not neighbours, the same for all matrices of a width."""
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(weight.shape[1]))
    tensors, value = _gptq(weight[:, order])
    groups, places = tensors["g_idx"], torch.argsort(order)
    numbers = _four_bits(weight[:, order])[0][:, places]
    tensors |= {"g_idx": groups[places], "qweight": gptq_words(numbers.T.contiguous(), 4)}
    return tensors, value[:, places]


def _int4(weight: torch.Tensor, *, symmetric: bool) -> tuple[Tensors, torch.Tensor]:
    if not symmetric:
        numbers, scales, zeros, value = _four_bits(weight)
        packed_zeros = compressed_words(zeros, 4, dim=0)
        return {
            "weight_packed": compressed_words(numbers, 4),
            "weight_scale": scales,
            "weight_zero_point": packed_zeros,
        }, value
    grouped = _grouped(weight)
    scales = (grouped.abs().amax(dim=2) / 7.5).half()
    numbers = (grouped / scales.float()[:, :, None]).round().clamp(-8, 7)
    value = (numbers * scales.float()[:, :, None]).view(weight.shape)
    tensors = {"weight_packed": compressed_words(numbers.view(weight.shape) + 8, 4), "weight_scale": scales}
    return tensors, value


def _int8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scales = weight.abs().amax(dim=1, keepdim=True) / 127
    numbers = (weight / scales).round()
    return {"weight": numbers.to(torch.int8), "weight_scale": scales}, numbers * scales


def _fp8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scales = weight.abs().amax(dim=1, keepdim=True) / 448
    numbers = (weight / scales).to(FP8)
    return {"weight": numbers, "weight_scale": scales}, numbers.float() * scales


def _static_fp8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """One scale for a matrix, and one for all its inputs, which are within 20."""
    scale = weight.abs().amax() / 448
    numbers = (weight / scale).to(FP8)
    tensors = {"weight": numbers, "weight_scale": scale, "input_scale": torch.tensor(20.0 / 448)}
    return tensors, numbers.float() * scale


def _fp8_blocks(weight: torch.Tensor, scale_name: str) -> tuple[Tensors, torch.Tensor]:
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    padded = torch.zeros(rows * BLOCK, columns * BLOCK)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    scales = padded.view(rows, BLOCK, columns, BLOCK).abs().amax(dim=(1, 3)) / 448
    wide = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: weight.shape[0], : weight.shape[1]]
    numbers = (weight / wide).to(FP8)
    return {"weight": numbers, scale_name: scales}, numbers.float() * wide


def _group(weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"weights": weights, "input_activations": inputs, "targets": ["Linear"]}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


def _packed(*, symmetric: bool) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": symmetric}
    return _group(weights)


def _rows(kind: str) -> dict[str, Any]:
    return {"num_bits": 8, "type": kind, "strategy": "channel", "symmetric": True}


def _tokens(kind: str) -> dict[str, Any]:
    return {"num_bits": 8, "type": kind, "strategy": "token", "dynamic": True, "symmetric": True}


_BLOCKS: Mapping[str, Any] = MappingProxyType(
    {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [BLOCK, BLOCK]}
)
_FP8_CONFIG: Mapping[str, Any] = MappingProxyType({"quant_method": "fp8", "activation_scheme": "dynamic"})
_GPTQ: Mapping[str, Any] = MappingProxyType({"quant_method": "gptq", "bits": 4, "group_size": GROUP})
FORMS: Mapping[str, Form] = MappingProxyType(
    {
        "awq": Form(_awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
        "gptq": Form(_gptq, {**_GPTQ, "desc_act": False}),
        "gptq in activation order": Form(_gptq_in_order, {**_GPTQ, "desc_act": True}),
        "w4a16": Form(lambda weight: _int4(weight, symmetric=True), _packed(symmetric=True)),
        "w4a16 with zero points": Form(lambda weight: _int4(weight, symmetric=False), _packed(symmetric=False)),
        "w8a16": Form(_int8, _group(_rows("int"))),
        "int8 w8a8": Form(_int8, _group(_rows("int"), _tokens("int"))),
        "fp8 w8a8": Form(_fp8, _group(_rows("float"), _tokens("float"))),
        "fp8 of weights": Form(_fp8, _group(_rows("float"))),
        "fp8": Form(_fp8, _FP8_CONFIG),
        "fp8 static": Form(_static_fp8, {"quant_method": "fp8", "activation_scheme": "static"}),
        # On a CPU the inputs of blocks are not quantized.
        "fp8 blocks": Form(
            lambda weight: _fp8_blocks(weight, "weight_scale_inv"), {**_FP8_CONFIG, "weight_block_size": [BLOCK, BLOCK]}
        ),
        "compressed fp8 blocks": Form(lambda weight: _fp8_blocks(weight, "weight_scale"), _group(dict(_BLOCKS))),
    }
)
_TOWER = ("visual", "vision", "projector")


def is_of_decoder(name: str) -> bool:
    """Whether a tensor is a matrix of the decoder's layers."""
    return name.endswith("_proj.weight") and not any(part in name for part in _TOWER)


def is_of_encoder(name: str) -> bool:
    """Whether a tensor may be a matrix of the vision tower or of the projector; embeddings are none."""
    return name.endswith(".weight") and any(part in name for part in _TOWER) and "embed" not in name


def stored(
    folder: Path, out: Path, form: str, chosen: Callable[[str], bool] = is_of_decoder, *, unpacked: bool = False
) -> Path:
    """The checkpoint in `folder` with the chosen matrices in `form`, or with what these are in full precision."""
    store, config = FORMS[form].store, FORMS[form].config
    shutil.copytree(folder, out)
    file, count = out / "model.safetensors", 0
    tensors: Tensors = {}
    for name, weight in load_file(file).items():
        if weight.ndim == 2 and chosen(name):
            parts, value = store(weight.float())
            parts = {"weight": value} if unpacked else parts
            tensors |= {name.removesuffix("weight") + part: x.contiguous() for part, x in parts.items()}
            count += 1
        else:
            tensors[name] = weight
    assert count > 0
    save_file(tensors, file, metadata={"format": "pt"})
    if not unpacked:
        path = out / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": dict(config)}))
    return out
