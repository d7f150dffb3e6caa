"""What a quantized checkpoint says that is not served: refused with a sentence when it is loaded, never passed over."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import engine_config, prompt_logits
from reference_models import save_reference_model
from safetensors.torch import load_file, save_file
from stored_models import is_of_decoder, stored

from mmserve.engine.engine import Engine
from mmserve.errors import SetupError

PROMPT = list(range(5, 25))
Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reference_model("llama", tmp_path_factory.mktemp("full"), intermediate_size=128, num_hidden_layers=1)


def changed(folder: Path, change: Change) -> Path:
    """`change` gets the `quantization_config` and the tensors."""
    path, file = folder / "config.json", folder / "model.safetensors"
    config, tensors = json.loads(path.read_text()), load_file(file)
    change(config.setdefault("quantization_config", {}), tensors)
    path.write_text(json.dumps({key: value for key, value in config.items() if value}))
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def group_of(config: dict[str, Any]) -> dict[str, Any]:
    group: dict[str, Any] = config["config_groups"]["group_0"]
    return group


def _asymmetric(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    group_of(config)["weights"]["symmetric"] = False
    for name in [name for name in tensors if name.endswith("weight_scale")]:
        tensors[name.replace("_scale", "_zero_point")] = torch.full_like(tensors[name], 3).to(torch.int8)


def _of_another_kind(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    group_of(config)["weights"]["type"] = "float"


def _other_inputs(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    group_of(config)["input_activations"]["type"] = "float"


def _inputs_of_four_bits(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    group_of(config)["input_activations"]["num_bits"] = 4


def _transformed(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config["transform_config"] = {"config_groups": {"u": {"type": "hadamard"}}}


def _e5m2(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype is torch.float8_e4m3fn:
            tensors[name] = tensor.float().to(torch.float8_e5m2)


def _without_scales(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config.clear()
    for name in [name for name in tensors if name.endswith("weight_scale")]:
        del tensors[name]


def _scales_of_blocks(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if name.endswith("weight_scale")]:
        tensors[name + "_inv"] = tensors.pop(name)


def _unknown_method(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config["quant_method"] = "bitsandbytes"


def _one_scale_missing(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.0.mlp.down_proj.weight_scale"]


def _other_group_size(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config["group_size"] = 48


def _smaller_last_group(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config["group_size"] = 48
    for name in [name for name in tensors if name.endswith("g_idx")]:
        del tensors[name]


def _order_without_groups(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.self_attn.q_proj.g_idx"].zero_()


@pytest.mark.parametrize(
    ("form", "change", "sentence"),
    [
        ("w8a16", _asymmetric, "zero points"),
        ("w8a16", _of_another_kind, "stored as int8, but .* says float8_e4m3fn"),
        ("int8 w8a8", _other_inputs, "with these activations are not served"),
        ("int8 w8a8", _inputs_of_four_bits, "with these activations are not served"),
        ("w4a16", _transformed, "transform_config"),
        ("fp8", _e5m2, "stored as float8_e5m2"),
        ("fp8", _scales_of_blocks, "has weights that this model has no place for"),
        ("fp8", _unknown_method, "'bitsandbytes', which is not served"),
        ("w8a16", _without_scales, "stored as int8 without a scale"),
        ("w8a16", _one_scale_missing, "stored as int8 without a scale"),
        ("awq", _other_group_size, "has shape"),
        ("gptq", _other_group_size, "groups of other sizes than 48"),
        ("gptq", _smaller_last_group, "in groups of 48 are not served where a matrix has 64 columns"),
        ("gptq", _order_without_groups, "groups of other sizes than 32"),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_is_not_served_is_refused(
    form: str, change: Change, sentence: str, dtype: Any, full: Path, tmp_path: Path
) -> None:
    folder = changed(stored(full, tmp_path / "stored", form), change)
    with pytest.raises(SetupError, match=sentence) as caught:
        Engine(replace(engine_config(folder), dtype=dtype))
    assert caught.value.code == "model_unavailable"


@pytest.mark.parametrize(
    ("form", "asked", "sentence"),
    [
        ("gptq", "awq", "--quantization awq does not fit .* stored as gptq"),
        ("awq", "fp8", "--quantization fp8 does not fit .* stored as awq"),
        (None, "gptq", "this one is in full precision"),
    ],
)
def test_what_was_asked_for_and_does_not_fit(
    form: str | None, asked: Any, sentence: str, full: Path, tmp_path: Path
) -> None:
    folder = full if form is None else stored(full, tmp_path / "stored", form)
    with pytest.raises(SetupError, match=sentence) as caught:
        Engine(replace(engine_config(folder), quantization=asked))
    assert (caught.value.code, caught.value.param) == ("model_unavailable", "quantization")


@pytest.mark.parametrize("form", ["awq", "w4a16", "w8a16", "fp8 of weights", "fp8 blocks"])
@pytest.mark.parametrize("left", ["q_proj", "v_proj", "up_proj"])
def test_layers_that_a_checkpoint_leaves_out(form: str, left: str, full: Path, tmp_path: Path) -> None:
    """Matrices that are multiplied as one are each in its own form."""

    def is_chosen(name: str) -> bool:
        return is_of_decoder(name) and left not in name

    small = Engine(engine_config(stored(full, tmp_path / "small", form, is_chosen)))
    same = Engine(engine_config(stored(full, tmp_path / "same", form, is_chosen, unpacked=True)))
    torch.testing.assert_close(prompt_logits(small, PROMPT), prompt_logits(same, PROMPT), rtol=1e-3, atol=1e-3)


def test_groups_of_layers_that_are_quantized_in_different_ways(full: Path, tmp_path: Path) -> None:
    """Values in INT8, all others in FP8: each is stored and multiplied as its group says."""

    def is_value(name: str) -> bool:
        return name.endswith("v_proj.weight")

    def is_other(name: str) -> bool:
        return is_of_decoder(name) and not is_value(name)

    folder = stored(full, tmp_path / "values", "w8a16", is_value)
    group = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    mixed = stored(
        folder, tmp_path / "mixed", "fp8 of weights", lambda name: is_of_decoder(name) and not is_value(name)
    )

    def add_group(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        config["config_groups"] = {"a": {**group, "targets": ["re:.*v_proj$"]}, **config["config_groups"]}

    same = stored(full, tmp_path / "same values", "w8a16", is_value, unpacked=True)
    same = stored(same, tmp_path / "same", "fp8 of weights", is_other, unpacked=True)
    ours, theirs = Engine(engine_config(changed(mixed, add_group))), Engine(engine_config(same))
    torch.testing.assert_close(prompt_logits(ours, PROMPT), prompt_logits(theirs, PROMPT), rtol=1e-3, atol=1e-3)
