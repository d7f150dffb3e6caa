"""A quantized model as a folder that transformers, vLLM and mmserve load: compressed-tensors' config, safetensors."""

import json
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mmserve.quantizer.block import INPUTS
from mmserve.quantizer.settings import NUM_BITS, QuantizeSettings
from mmserve.quantizer.states import save_tensors

SHARD_BYTES = 4 * 1024**3
# The config.json is written anew, and the weights are.
_NOT_COPIED = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".index.json")
_TEXT_SUFFIXES = (".json", ".jinja", ".txt", ".model")
# Modules of vision-language models that are never quantized, by the names that they have in transformers.
_VISION_MODULES = (r"re:.*(vision|visual|multi_modal_projector|connector).*",)


def kept_modules(groups: Iterable[tuple[int, str]]) -> list[str]:
    """Patterns of the modules of `groups`, a layer's number and one of `INPUTS`, whatever the layers' prefix is."""
    return [rf"re:.*\blayers\.{layer}\.{re.escape(name)}$" for layer, group in sorted(groups) for name in INPUTS[group]]


def quantization_config(settings: QuantizeSettings, *, kept: Sequence[str], has_vision: bool) -> dict[str, Any]:
    """The part of `config.json` that says how weights are stored, as compressed-tensors writes it."""
    if settings.is_grouped:
        stored, inputs = "pack-quantized", None
        weights = _arguments(
            NUM_BITS, "int", "group", symmetric=settings.symmetric, group_size=settings.group_size, dynamic=False
        )
        if settings.scheme == "gptq" and settings.act_order:
            weights["actorder"] = "static"
    else:
        kind = "float" if settings.scheme == "fp8" else "int"
        stored = f"{kind}-quantized"
        weights = _arguments(8, kind, "channel", symmetric=True, group_size=None, dynamic=False)
        inputs = _arguments(8, kind, "token", symmetric=True, group_size=None, dynamic=True)
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "config_groups": {"group_0": {**group, "format": stored}},
        "format": stored,
        "ignore": ["lm_head", *kept, *(_VISION_MODULES if has_vision else ())],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def _arguments(
    num_bits: int, kind: str, strategy: str, *, symmetric: bool, group_size: int | None, dynamic: bool
) -> dict[str, Any]:
    return {
        "num_bits": num_bits,
        "type": kind,
        "strategy": strategy,
        "symmetric": symmetric,
        "group_size": group_size,
        "dynamic": dynamic,
        "actorder": None,
        "observer": None if dynamic else "minmax",
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def copy_side_files(source: Path, out: Path) -> None:
    """Tokenizer, processor and generation settings of a model folder, as they are."""
    for path in sorted(source.iterdir()):
        is_text = path.name.endswith(_TEXT_SUFFIXES) and not path.name.endswith(_NOT_COPIED)
        if path.is_file() and is_text and path.name != "config.json":
            shutil.copyfile(path, out / path.name)


def write_shards(tensors: Iterable[tuple[str, torch.Tensor]], out: Path, *, max_bytes: int) -> None:
    """`model.safetensors`, or several files with their index; no more than one file's tensors are held at once."""
    shards: list[list[str]] = []
    held: dict[str, torch.Tensor] = {}
    num_bytes = total = 0

    def write() -> None:
        file = out / _unfinished(len(shards))
        file.touch()
        mode = file.stat().st_mode
        save_tensors(held, file, {"format": "pt"})
        # safetensors makes files that only their owner can read.
        file.chmod(mode)
        shards.append(sorted(held))
        held.clear()

    for name, tensor in tensors:
        if held and num_bytes + tensor.nbytes > max_bytes:
            write()
            num_bytes = 0
        held[name] = tensor.contiguous()
        num_bytes += tensor.nbytes
        total += tensor.nbytes
    write()
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
        weight_map = {name: file for file, inside in zip(names, shards, strict=True) for name in inside}
        write_json(out / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    for i, name in enumerate(names):
        (out / _unfinished(i)).replace(out / name)


def _unfinished(index: int) -> str:
    return f"unfinished-{index}"
