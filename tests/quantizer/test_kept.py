"""What stays in full precision beside eight bits: the matrices whose rounding harms most, within a share of all."""

import json
import re
from pathlib import Path

import pytest
import torch
from quantized_models import SEQ_LEN, calibration_ids, our_logprobs, quantizer, their_logprobs
from reference_models import save_reference_model
from reference_qwen_vl import save_qwen_vl

from mmserve.config import ModelConfig
from mmserve.errors import RequestError
from mmserve.quantizer.block import INPUTS, DecoderBlock, Tensors
from mmserve.quantizer.kept import Group, LayerHarm, choose_kept
from mmserve.quantizer.layer_quantizer import input_rounding
from mmserve.quantizer.rounding import RowForm, round_to_nearest
from mmserve.quantizer.run import _names_by_layer
from mmserve.quantizer.settings import QuantizeSettings
from mmserve.weights.checkpoint import open_checkpoint

CPU = torch.device("cpu")
IDS = calibration_ids(1, seed=9)[0].tolist()
FORM, ROUNDING = RowForm("fp8", torch.float32), input_rounding("fp8")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reference_model("llama", tmp_path_factory.mktemp("llama"), intermediate_size=128)


def layer_of(folder: Path) -> tuple[ModelConfig, Tensors]:
    checkpoint = open_checkpoint(str(folder))
    config = ModelConfig.from_hf(checkpoint.config)
    names = _names_by_layer(checkpoint, config.num_layers)[0]
    return config, {inside: checkpoint.tensor(name) for inside, name in names.items()}


def states(config: ModelConfig) -> torch.Tensor:
    return torch.randn(4, SEQ_LEN, config.hidden_size, generator=torch.Generator().manual_seed(1))


def test_harm_is_that_of_one_group_alone(llama: Path) -> None:
    config, tensors = layer_of(llama)
    x, exact = states(config), DecoderBlock(config, SEQ_LEN, CPU)
    harm = LayerHarm(exact, tensors, FORM, ROUNDING)
    outputs = torch.cat([harm.add(part) for part in torch.split(x, 3)])
    assert torch.allclose(outputs, exact(x, tensors), atol=1e-5)
    for group, names in INPUTS.items():
        weights = {f"{name}.weight" for name in names}
        rounded = {
            name: round_to_nearest(tensor, FORM).dequantized() if name in weights else tensor
            for name, tensor in tensors.items()
        }
        others = frozenset(INPUTS) - {group}
        found = DecoderBlock(config, SEQ_LEN, CPU, rounding=ROUNDING, kept=others)(x, rounded)
        wanted = ((found - outputs).norm(dim=-1) / outputs.norm(dim=-1)).square().sum()
        assert harm.by_group()[group] == pytest.approx(float(wanted), rel=1e-2)


def test_matrices_that_add_much_harm_most(llama: Path) -> None:
    config, tensors = layer_of(llama)
    tensors["self_attn.o_proj.weight"] *= 50
    harm = LayerHarm(DecoderBlock(config, SEQ_LEN, CPU), tensors, FORM, ROUNDING)
    harm.add(states(config))
    found = harm.by_group()
    assert found["attention_output"] > 3 * max(found["feed_forward"], found["feed_forward_output"])


def test_the_most_harm_for_the_room() -> None:
    sizes = {"attention": 2, "feed_forward": 6}
    harm: dict[Group, float] = {
        (0, "attention"): 4.0, (1, "attention"): 1.0, (0, "feed_forward"): 9.0, (1, "feed_forward"): 6.0,
    }  # fmt: skip
    assert choose_kept(harm, sizes, 0.0) == []
    assert choose_kept(harm, sizes, 0.5) == [(0, "attention"), (0, "feed_forward")]
    # The second is too large for what is left, the last one is not.
    assert choose_kept(harm, sizes, 0.25) == [(0, "attention"), (1, "attention")]
    assert sorted(choose_kept(harm, sizes, 1.0)) == sorted(harm)


def ignored(config: Path, modules: set[str]) -> set[str]:
    """As compressed-tensors reads it."""
    patterns = json.loads((config / "config.json").read_text())["quantization_config"]["ignore"]
    return {
        module
        for module in modules
        for pattern in patterns
        if (re.match(pattern[3:], module) if pattern.startswith("re:") else pattern == module)
    }


@pytest.mark.parametrize("scheme", ["fp8", "int8"])
def test_the_share_is_kept_and_said(llama: Path, tmp_path: Path, scheme: str) -> None:
    made = tmp_path / "made"
    quantizer(llama, made, scheme, samples=calibration_ids(), keep=0.3).run()
    full, found = open_checkpoint(str(llama)), open_checkpoint(str(made))
    modules = {f"model.layers.{i}.{name}" for i in range(3) for names in INPUTS.values() for name in names}
    kept = {module for module in modules if f"{module}.weight_scale" not in found.names()}
    sizes = {module: full.tensor(f"{module}.weight").numel() for module in modules}
    assert 0.15 < sum(sizes[module] for module in kept) / sum(sizes.values()) <= 0.3
    assert all(torch.equal(found.tensor(f"{module}.weight"), full.tensor(f"{module}.weight")) for module in kept)
    assert kept == ignored(made, modules)
    for i in range(3):
        for names in INPUTS.values():
            assert len({f"model.layers.{i}.{name}" in kept for name in names}) == 1
    assert float((our_logprobs(made, IDS) - their_logprobs(made, IDS)).abs().mean()) < 0.1


def test_names_in_a_model_that_sees(tmp_path: Path) -> None:
    full, made = tmp_path / "full", tmp_path / "made"
    save_qwen_vl("qwen2_5_vl", full)
    quantizer(full, made, "fp8", samples=calibration_ids(), keep=0.4).run()
    assert any(
        "layers" in pattern
        for pattern in json.loads((made / "config.json").read_text())["quantization_config"]["ignore"]
    )
    theirs = their_logprobs(made, IDS, "AutoModelForImageTextToText")
    assert float((our_logprobs(made, IDS) - theirs).abs().mean()) < 0.1


def test_without_texts_or_a_share_nothing_is_kept(llama: Path, tmp_path: Path) -> None:
    quantizer(llama, tmp_path / "plain", "fp8").run()
    quantizer(llama, tmp_path / "made", "fp8", samples=calibration_ids(), keep=0.0).run()
    quantizer(llama, tmp_path / "four", "gptq", samples=calibration_ids(), keep=0.5).run()
    for name in ("plain", "made", "four"):
        assert json.loads((tmp_path / name / "config.json").read_text())["quantization_config"]["ignore"] == ["lm_head"]
    with pytest.raises(RequestError, match="--keep must be between 0 and 1"):
        QuantizeSettings(scheme="fp8", keep=1.5)
