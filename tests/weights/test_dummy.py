import json
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_models import save_reference_model, save_reference_tokenizer

from mmserve.config import ModelConfig
from mmserve.errors import SetupError
from mmserve.quantization.registry import choose_scheme
from mmserve.quantization.scheme import LinearSpec, Placement
from mmserve.weights import dummy
from mmserve.weights.checkpoint import open_checkpoint
from mmserve.weights.loader import WeightReader

NAME = "model.layers.0.mlp.up_proj.weight"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_weights_have_the_shape_dtype_and_spread_of_real_ones(folder: Path) -> None:
    checkpoint = open_checkpoint(str(folder), load_format="dummy")
    tensor = checkpoint.tensor(NAME, (11008, 4096))
    assert tensor.shape == (11008, 4096)
    assert tensor.dtype == torch.bfloat16
    assert tensor.float().std().item() == pytest.approx(0.02, rel=0.02)
    assert abs(tensor.float().mean().item()) < 1e-3
    assert torch.equal(checkpoint.tensor("model.norm.weight", (64,)), torch.ones(64, dtype=torch.bfloat16))


def test_seed_and_name_decide_the_weights(folder: Path) -> None:
    def make(name: str, seed: int) -> torch.Tensor:
        return open_checkpoint(str(folder), load_format="dummy", seed=seed).tensor(name, (8, 8))

    assert torch.equal(make(NAME, 0), make(NAME, 0))
    assert not torch.equal(make(NAME, 0), make(NAME, 1))
    assert not torch.equal(make(NAME, 0), make("lm_head.weight", 0))


def test_a_tensor_larger_than_the_pool_is_filled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dummy, "_POOL_SIZE", 1000)
    tensor = open_checkpoint(str(folder), load_format="dummy").tensor(NAME, (64, 64))
    assert (tensor == 0).float().mean() < 0.02
    assert tensor.float().std().item() == pytest.approx(0.02, rel=0.1)


def test_the_reader_takes_anything_and_leaves_nothing_over(folder: Path) -> None:
    reader = WeightReader(open_checkpoint(str(folder), load_format="dummy"), dtype=torch.float32)
    assert reader.take(NAME, (3, 2)).dtype == torch.float32
    assert reader.take_quantized(NAME, (3, 2)) is None
    reader.finish()
    with pytest.raises(SetupError, match="shape of lm_head"):
        open_checkpoint(str(folder), load_format="dummy").tensor("lm_head.weight")


def test_configuration_is_that_of_the_folder(folder: Path) -> None:
    config = ModelConfig.from_hf(open_checkpoint(str(folder), load_format="dummy").config)
    assert (config.hidden_size, config.num_layers, config.dtype) == (4096, 32, "bfloat16")


def test_tokenizer_is_the_folder_s_or_a_stand_in(folder: Path) -> None:
    stand_in = open_checkpoint(str(folder), load_format="dummy").tokenizer()
    assert stand_in.vocab_size == 256
    assert stand_in.decode(stand_in.encode("naïve 東京")) == "naïve 東京"
    assert stand_in.encode_chat([{"role": "user", "content": "hi"}])
    save_reference_tokenizer(folder)
    assert open_checkpoint(str(folder), load_format="dummy").tokenizer().vocab_size == 400


def test_weights_that_are_there_are_not_read(tmp_path: Path) -> None:
    save_reference_model("llama", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    assert open_checkpoint(str(tmp_path), load_format="dummy").tensor("lm_head.weight", (400, 64)).shape == (400, 64)


def test_a_gguf_file_lends_its_shape(smollm2_path: Path) -> None:
    checkpoint = open_checkpoint(str(smollm2_path), load_format="dummy")
    assert checkpoint.config["hidden_size"] == 576
    assert checkpoint.tokenizer().vocab_size == 49152
    assert checkpoint.quantized("model.embed_tokens.weight") is None


@pytest.mark.parametrize("quantization", ["awq", "gptq", "fp8", "compressed-tensors"])
def test_quantized_weights_are_made_up_too(folder: Path, quantization: Any) -> None:
    """Of the spread that full ones have, in the decoder alone."""
    checkpoint = open_checkpoint(str(folder), load_format="dummy", quantization=quantization)
    scheme = choose_scheme(checkpoint.config, quantization)
    assert scheme is not None
    placement = Placement(torch.float32, torch.device("cpu"))
    reader = WeightReader(checkpoint)
    spec = LinearSpec(("model.layers.0.mlp.up_proj",), 256, (512,))
    weight = scheme.load(spec, reader, placement)
    assert weight is not None
    matrix = weight.apply(torch.eye(256), None)
    assert 0.01 < float(matrix.std()) < 0.04
    assert abs(float(matrix.mean())) < 4e-3
    for name in ("vision.blocks.0.mlp.up_proj", "lm_head"):
        assert scheme.load(LinearSpec((name,), 256, (512,)), reader, placement) is None
