"""The calibration's own decoder layer against transformers' models; AWQ's scaled layer against the one it came from."""

from pathlib import Path

import pytest
import torch
from quantized_models import SEQ_LEN, calibration_ids
from reference_models import FAMILIES, load_reference_model, save_reference_model

from mmserve.config import ModelConfig
from mmserve.quantizer.block import INPUTS, DecoderBlock, Tensors
from mmserve.quantizer.layer_quantizer import _scaled
from mmserve.quantizer.rounding import GroupForm
from mmserve.quantizer.run import _names_by_layer
from mmserve.quantizer.statistics import InputStatistics
from mmserve.weights.checkpoint import Checkpoint, open_checkpoint

CPU = torch.device("cpu")


def layers_of(checkpoint: Checkpoint, config: ModelConfig) -> list[Tensors]:
    names = _names_by_layer(checkpoint, config.num_layers)
    return [{inside: checkpoint.tensor(name) for inside, name in layer.items()} for layer in names]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_layers_one_after_the_other_are_the_model(family: str, tmp_path: Path) -> None:
    save_reference_model(family, tmp_path)
    checkpoint, ids = open_checkpoint(str(tmp_path)), calibration_ids(2)
    config = ModelConfig.from_hf(checkpoint.config)
    block = DecoderBlock(config, SEQ_LEN, CPU)
    x = checkpoint.tensor("model.embed_tokens.weight")[ids]
    for tensors in layers_of(checkpoint, config):
        x = block(x, tensors)
    with torch.no_grad():
        seen = load_reference_model(tmp_path)(ids, output_hidden_states=True)
        x = torch.nn.functional.rms_norm(x, x.shape[-1:], checkpoint.tensor("model.norm.weight"), config.rms_norm_eps)
    assert float((x - seen.hidden_states[-1]).norm() / seen.hidden_states[-1].norm()) < 1e-5


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_scaling_changes_nothing_but_the_weights(family: str, tmp_path: Path) -> None:
    save_reference_model(family, tmp_path, intermediate_size=128)
    checkpoint = open_checkpoint(str(tmp_path))
    config = ModelConfig.from_hf(checkpoint.config)
    tensors = layers_of(checkpoint, config)[0]
    block = DecoderBlock(config, SEQ_LEN, CPU)
    x = torch.randn(2, SEQ_LEN, config.hidden_size, generator=torch.Generator().manual_seed(4)) * 3
    x[..., 5] *= 30
    statistics = {
        group: InputStatistics.empty(tensors[f"{names[0]}.weight"].shape[1], CPU) for group, names in INPUTS.items()
    }
    state = block.start(x, tensors)
    statistics[state.group].add(state.inputs)
    for _ in range(len(INPUTS) - 1):
        state = block.advance(state, tensors)
        statistics[state.group].add(state.inputs)
    before = block(x, tensors)
    scaled, _ = _scaled(dict(tensors), statistics, config, GroupForm(4, 32, symmetric=False, scale_dtype=torch.float32))
    assert not torch.allclose(scaled["mlp.down_proj.weight"], tensors["mlp.down_proj.weight"])
    assert float((block(x, scaled) - before).norm() / before.norm()) < 1e-5
