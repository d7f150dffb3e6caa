from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter, quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from reference_gguf import save_reference_gguf
from reference_models import FAMILIES, save_reference_model

from mmserve.config import ModelConfig
from mmserve.errors import SetupError
from mmserve.weights.checkpoint import open_checkpoint
from mmserve.weights.gguf_blocks import BLOCK_TYPES, dequantize

# Half a quantisation step for weights within about four standard deviations of 0.15.
STEP = {"Q8_0": 0.01, "Q4_0": 0.2, "Q4_1": 0.15, "Q5_0": 0.1, "Q5_1": 0.08}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_equals_the_checkpoint_that_it_was_made_from(family: str, tied: bool, tmp_path: Path) -> None:
    folder = save_reference_model(family, tmp_path / "hf", tied=tied)
    original = open_checkpoint(str(folder))
    converted = open_checkpoint(str(save_reference_gguf(folder, tmp_path / "model.gguf")))
    assert converted.names() == original.names()
    for name in original.names():
        assert torch.equal(converted.tensor(name), original.tensor(name)), name


@pytest.mark.parametrize("family", FAMILIES)
def test_configuration_equals_the_original(family: str, tmp_path: Path) -> None:
    folder = save_reference_model(family, tmp_path / "hf")
    original, converted = (
        ModelConfig.from_hf(open_checkpoint(str(path)).config)
        for path in (folder, save_reference_gguf(folder, tmp_path / "model.gguf"))
    )
    # llama.cpp files Mistral under llama and keeps neither its window nor its name.
    differing = {"architecture", "sliding_window"} if family == "mistral" else set()
    for field in ModelConfig.__dataclass_fields__.keys() - differing - {"rms_norm_eps", "eos_token_ids", "rope"}:
        assert getattr(converted, field) == getattr(original, field), field
    assert converted.rms_norm_eps == pytest.approx(original.rms_norm_eps)
    assert set(original.eos_token_ids) <= set(converted.eos_token_ids)
    assert converted.rope.theta == original.rope.theta
    assert dict(converted.rope.scaling or {}) == dict(original.rope.scaling or {})


@pytest.mark.parametrize("type_name", ["F16", "BF16"])
def test_plain_types_keep_their_dtype(type_name: str, tmp_path: Path) -> None:
    folder = save_reference_model("llama", tmp_path / "hf", num_hidden_layers=1)
    checkpoint = open_checkpoint(str(save_reference_gguf(folder, tmp_path / "model.gguf", type_name=type_name)))
    expected = torch.float16 if type_name == "F16" else torch.bfloat16
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(checkpoint.tensor(name), open_checkpoint(str(folder)).tensor(name).to(expected))
    assert checkpoint.config["dtype"] == str(expected).removeprefix("torch.")
    assert checkpoint.quantized(name) is None


@pytest.mark.parametrize("type_name", STEP)
def test_quantised_weights_are_near_the_originals_and_in_their_order(type_name: str, tmp_path: Path) -> None:
    folder = save_reference_model("llama", tmp_path / "hf", num_hidden_layers=1, intermediate_size=128)
    checkpoint = open_checkpoint(str(save_reference_gguf(folder, tmp_path / "model.gguf", type_name=type_name)))
    original = open_checkpoint(str(folder))
    for name in original.names():
        assert (checkpoint.tensor(name) - original.tensor(name)).abs().max() < STEP[type_name], name
        packed = checkpoint.quantized(name)
        assert (packed is None) == name.endswith("norm.weight")
        if packed is not None:
            assert (packed.type, packed.shape) == (type_name, tuple(original.tensor(name).shape))
            assert torch.equal(dequantize(packed.data, packed.type), checkpoint.tensor(name))


@pytest.mark.parametrize("type_name", BLOCK_TYPES)
def test_every_block_type_is_dequantised_as_gguf_does(type_name: str) -> None:
    kind = GGMLQuantizationType[type_name]
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(0)
    # More rows than one task takes; scales must be finite numbers, hence bytes below the exponent of infinity.
    blocks = generator.integers(0, 120, (1037, 4096 // block_size * block_bytes), dtype=np.uint8)
    values = dequantize(torch.from_numpy(blocks), type_name)
    assert values.shape == (1037, 4096)
    assert np.array_equal(values.numpy(), quants.dequantize(blocks, kind))


def test_unsupported_tensor_type_is_named(tmp_path: Path) -> None:
    writer = GGUFWriter(str(tmp_path / "model.gguf"), "llama")
    data = np.zeros((2, 66), dtype=np.uint8)
    writer.add_tensor("blk.0.attn_q.weight", data, raw_dtype=GGMLQuantizationType.IQ2_XXS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(SetupError, match=r"blk\.0\.attn_q\.weight as IQ2_XXS.*Q4_K"):
        open_checkpoint(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"split.count": 3}, "one part of several"),
        ({"llama.rope.dimension_count": 8}, "part of each head"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
    ],
)
def test_what_is_not_supported_is_refused(metadata: dict[str, object], message: str, tmp_path: Path) -> None:
    folder = save_reference_model("llama", tmp_path / "hf", num_hidden_layers=1)
    path = save_reference_gguf(folder, tmp_path / "model.gguf", metadata=metadata)
    with pytest.raises(SetupError, match=message):
        open_checkpoint(str(path))


def test_yarn_and_linear_scaling_are_carried_over(tmp_path: Path) -> None:
    folder = save_reference_model("qwen2", tmp_path / "hf", num_hidden_layers=1)
    keys = {"type": "yarn", "factor": 4.0, "original_context_length": 128, "yarn_beta_fast": 16.0}
    yarn = {f"qwen2.rope.scaling.{key}": value for key, value in keys.items()}
    config = open_checkpoint(str(save_reference_gguf(folder, tmp_path / "yarn.gguf", metadata=yarn))).config
    assert config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 16.0,
    }
    linear = {"qwen2.rope.scaling.type": "linear", "qwen2.rope.scaling.factor": 2.0}
    config = open_checkpoint(str(save_reference_gguf(folder, tmp_path / "linear.gguf", metadata=linear))).config
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


def test_unknown_architecture_is_named(tmp_path: Path) -> None:
    writer = GGUFWriter(str(tmp_path / "model.gguf"), "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(SetupError, match="mamba"):
        open_checkpoint(str(tmp_path / "model.gguf"))


def test_format_that_was_not_asked_for_is_refused(tmp_path: Path) -> None:
    folder = save_reference_model("llama", tmp_path / "hf", num_hidden_layers=1)
    with pytest.raises(SetupError, match="--load-format auto"):
        open_checkpoint(str(folder), load_format="gguf")
