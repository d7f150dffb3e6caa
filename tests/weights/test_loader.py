from pathlib import Path

import pytest
import torch
from reference_gguf import save_reference_gguf
from reference_models import save_reference_model

from mmserve.errors import SetupError
from mmserve.weights.checkpoint import open_checkpoint
from mmserve.weights.loader import WeightReader


def shapes_of(folder: Path) -> dict[str, tuple[int, ...]]:
    checkpoint = open_checkpoint(str(folder))
    return {name: tuple(checkpoint.tensor(name).shape) for name in checkpoint.names()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reference_model("qwen3", tmp_path_factory.mktemp("qwen3"), num_hidden_layers=1)


def test_all_taken_is_finished(folder: Path) -> None:
    reader = WeightReader(open_checkpoint(str(folder)))
    for name, shape in shapes_of(folder).items():
        assert reader.take(name, shape).shape == shape
    reader.finish()


def test_left_over_weight_is_named(folder: Path) -> None:
    reader = WeightReader(open_checkpoint(str(folder)))
    for name, shape in shapes_of(folder).items():
        if "q_norm" not in name:
            reader.take(name, shape)
    with pytest.raises(SetupError, match=r"model\.layers\.0\.self_attn\.q_norm\.weight$"):
        reader.finish()


def test_many_left_over_weights_are_counted(folder: Path) -> None:
    with pytest.raises(SetupError, match="and 6 more"):
        WeightReader(open_checkpoint(str(folder))).finish()


def test_missing_weight_is_named(folder: Path) -> None:
    reader = WeightReader(open_checkpoint(str(folder)))
    with pytest.raises(SetupError, match=r"model\.layers\.9\.mlp\.up_proj\.weight"):
        reader.take("model.layers.9.mlp.up_proj.weight", (1, 1))


def test_wrong_shape_names_both_shapes(folder: Path) -> None:
    with pytest.raises(SetupError, match=r"model\.norm\.weight has shape \[64\].*asks for \[65\]"):
        WeightReader(open_checkpoint(str(folder))).take("model.norm.weight", (65,))


def test_tensors_come_in_the_dtype_asked_for(folder: Path) -> None:
    reader = WeightReader(open_checkpoint(str(folder)), dtype=torch.bfloat16)
    assert reader.take("model.norm.weight", (64,)).dtype == torch.bfloat16


def test_tied_head_and_rotary_buffers_are_not_left_over() -> None:
    class Old:
        config = {"tie_word_embeddings": True}  # noqa: RUF012
        generation_config: dict[str, object] = {}  # noqa: RUF012

        def names(self) -> frozenset[str]:
            return frozenset({"lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"})

    WeightReader(Old()).finish()  # type: ignore[arg-type]
    Old.config = {"tie_word_embeddings": False}
    with pytest.raises(SetupError, match=r"lm_head\.weight"):
        WeightReader(Old()).finish()  # type: ignore[arg-type]


def test_packed_weights_count_as_taken_and_are_checked(tmp_path: Path) -> None:
    folder = save_reference_model("qwen2", tmp_path / "hf", num_hidden_layers=1, intermediate_size=128)
    path = save_reference_gguf(folder, tmp_path / "model.gguf", type_name="Q8_0")
    reader = WeightReader(open_checkpoint(str(path)))
    for name, shape in shapes_of(path).items():
        packed = reader.take_quantized(name, (shape[0], shape[1])) if len(shape) == 2 else None
        assert (packed is None) == (len(shape) == 1)
        if packed is None:
            reader.take(name, shape)
    reader.finish()
    with pytest.raises(SetupError, match=r"embed_tokens"):
        reader.take_quantized("model.embed_tokens.weight", (1, 64))


def test_weights_that_a_model_leaves_are_not_left_over(folder: Path) -> None:
    reader = WeightReader(open_checkpoint(str(folder)))
    for name, shape in shapes_of(folder).items():
        if ".self_attn.q_norm." not in name and ".mlp." not in name:
            reader.take(name, shape)
    reader.leave("model.layers.0.self_attn.q_norm.")
    with pytest.raises(SetupError, match=r"for: model\.layers\.0\.mlp\.down_proj\.weight"):
        reader.finish()
    reader.leave("model.layers.0.mlp.")
    reader.finish()
