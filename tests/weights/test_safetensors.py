import json
from pathlib import Path

import pytest
import torch
from reference_models import FAMILIES, load_reference_model, save_reference_model
from safetensors.torch import load_file, save_file

from mmserve.config import ModelConfig
from mmserve.errors import SetupError
from mmserve.weights.checkpoint import open_checkpoint


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_transformers_parameters(family: str, tmp_path: Path) -> None:
    save_reference_model(family, tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    expected = load_reference_model(tmp_path).state_dict()
    if checkpoint.config["tie_word_embeddings"]:
        expected.pop("lm_head.weight")
    assert checkpoint.names() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(checkpoint.tensor(name, tuple(values.shape)), values)


def test_shards_are_read_as_one(tmp_path: Path) -> None:
    whole = open_checkpoint(str(save_reference_model("qwen2", tmp_path / "whole")))
    sharded_folder = save_reference_model("qwen2", tmp_path / "sharded", max_shard_size="100KB")
    assert len(list(sharded_folder.glob("*.safetensors"))) > 2
    sharded = open_checkpoint(str(sharded_folder))
    assert sharded.names() == whole.names()
    assert all(torch.equal(sharded.tensor(name), whole.tensor(name)) for name in whole.names())


def test_tied_checkpoint_has_no_head(tmp_path: Path) -> None:
    assert "lm_head.weight" not in open_checkpoint(str(save_reference_model("llama", tmp_path, tied=True))).names()


def test_bfloat16_stays_bfloat16(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(save_reference_model("llama", tmp_path, dtype=torch.bfloat16)))
    assert checkpoint.tensor("model.norm.weight").dtype == torch.bfloat16
    assert ModelConfig.from_hf(checkpoint.config, checkpoint.generation_config).dtype == "bfloat16"


def test_bare_decoder_names_get_their_prefix(tmp_path: Path) -> None:
    save_reference_model("llama", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    save_file({name.removeprefix("model."): values for name, values in stored.items()}, tmp_path / "model.safetensors")
    assert open_checkpoint(str(tmp_path)).names() == stored.keys()


def test_missing_shard_is_named(tmp_path: Path) -> None:
    save_reference_model("llama", tmp_path, max_shard_size="100KB")
    lost = sorted(tmp_path.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(SetupError, match=lost.name):
        open_checkpoint(str(tmp_path))


def test_index_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_reference_model("llama", folder)
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    index = {"weight_map": {"model.norm.weight": "../outside.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(SetupError, match="outside"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_refused_unread(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(SetupError, match="pickle") as caught:
        open_checkpoint(str(tmp_path))
    assert caught.value.code == "model_unavailable"


def test_folder_without_weights_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SetupError, match="dummy"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("content", [b"", b"\x00" * 40, b"\xff" * 8 + b"{}"])
def test_damaged_file_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(SetupError, match=r"model\.safetensors"):
        open_checkpoint(str(tmp_path))


def test_remote_code_is_ignored(tmp_path: Path) -> None:
    save_reference_model("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModelForCausalLM": "evil.Model"}}))
    (tmp_path / "evil.py").write_text("raise RuntimeError('this ran')")
    checkpoint = open_checkpoint(str(tmp_path))
    assert "auto_map" not in checkpoint.config
    assert checkpoint.tokenizer().vocab_size == 400


def test_damaged_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SetupError, match=r"config\.json is not valid JSON"):
        open_checkpoint(str(tmp_path))
