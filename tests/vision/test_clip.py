from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_llava import FAMILIES, Family, Reference, save_llava
from vision_driver import relative_error

from mmserve.errors import SetupError
from mmserve.vision.clip import USUAL_CLIP, ClipVit
from mmserve.vision.projector import Projector
from mmserve.vision.square_features import SquareFeatures, SquareFeaturesConfig
from mmserve.vision.vit import VitConfig, hidden_state_numbers
from mmserve.weights.checkpoint import open_checkpoint
from mmserve.weights.layer_loader import LayerLoader
from mmserve.weights.loader import WeightReader

# Heads of an uncommon size, and pixels beyond the last whole patch.
SIDE = 60
_LARGER = {"hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 4, "image_size": SIDE}
# Of llava-hf/llava-1.5-7b-hf.
_PUBLISHED = {
    "model_type": "llava",
    "vision_config": {"model_type": "clip_vision_model", "hidden_size": 1024, "image_size": 336, "patch_size": 14}
    | {"intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24, "vocab_size": 32000},
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "projector_hidden_act": "gelu",
}


def larger(family: Family, **more: Any) -> Family:
    """Of random weights alone: its processor would not fit."""
    return replace(family, vision={**family.vision, **_LARGER}, more={**family.more, **more})


def loader(folder: Path, dtype: torch.dtype = torch.float32) -> LayerLoader:
    return LayerLoader(WeightReader(open_checkpoint(str(folder))), dtype, torch.device("cpu"))


def config(folder: Path) -> SquareFeaturesConfig:
    return SquareFeaturesConfig.from_hf(open_checkpoint(str(folder)).config)


def squares(count: int, seed: int = 0, side: int = SIDE) -> torch.Tensor:
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def hidden_states(reference: Reference, pixels: torch.Tensor, numbers: tuple[int, ...]) -> torch.Tensor:
    output = reference.model.model.vision_tower(pixels, output_hidden_states=True)
    return torch.cat([output.hidden_states[number] for number in numbers], dim=-1)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    family = larger(FAMILIES["llava"])
    return Reference(family, save_llava(family, tmp_path_factory.mktemp("clip")))


def tower(reference: Reference, *numbers: int, dtype: torch.dtype = torch.float32) -> ClipVit:
    return ClipVit(loader(reference.folder, dtype), config(reference.folder).tower, numbers)


@pytest.mark.parametrize("numbers", [(0,), (1,), (3,), (4,), (4, 0, 2)])
@torch.inference_mode()
def test_hidden_states_equal_the_reference(reference: Reference, numbers: tuple[int, ...]) -> None:
    expected = hidden_states(reference, squares(3), numbers)
    found = tower(reference, *numbers)(squares(3))
    assert found.shape == expected.shape == (3, 17, 48 * len(numbers))
    assert relative_error(found, expected) < 1e-4


@torch.inference_mode()
def test_the_error_shows_a_fault(reference: Reference) -> None:
    right = tower(reference, 3)(squares(2))
    assert relative_error(tower(reference, 2)(squares(2)), right) > 1e-2
    assert relative_error(tower(reference, 3)(squares(2).flip(0)), right) > 1e-2
    moved = tower(reference, 3)
    moved._positions = moved._positions.roll(1, 0)
    assert relative_error(moved(squares(2)), right) > 1e-2


@torch.inference_mode()
def test_neighbours_in_the_batch_change_nothing(reference: Reference) -> None:
    model, pixels = tower(reference, 3), squares(4)
    for square, together in zip(pixels, model(pixels), strict=True):
        assert relative_error(together, model(square[None])[0]) < 1e-5


@torch.inference_mode()
def test_bfloat16_is_as_near_as_the_reference_in_bfloat16(reference: Reference) -> None:
    exact = hidden_states(reference, squares(2), (3,))
    ours = tower(reference, 3, dtype=torch.bfloat16)(squares(2))
    assert ours.dtype is torch.bfloat16
    in_bfloat16 = deepcopy(reference.model.model.vision_tower).to(torch.bfloat16)
    theirs = in_bfloat16(squares(2).to(torch.bfloat16), output_hidden_states=True).hidden_states[3]
    assert relative_error(ours.float(), exact) < 1.3 * relative_error(theirs.float(), exact)


@pytest.mark.parametrize(
    ("more", "num_tokens"),
    [
        ({}, 16),
        ({"vision_feature_layer": 2, "vision_feature_select_strategy": "full"}, 17),
        ({"vision_feature_layer": [-1, 1, -3]}, 16),
        ({"projector_hidden_act": "quick_gelu", "multimodal_projector_bias": False}, 16),
    ],
    ids=str,
)
@torch.inference_mode()
def test_tower_and_projector_equal_the_reference(tmp_path: Path, more: dict[str, Any], num_tokens: int) -> None:
    family = larger(FAMILIES["llava"], **more)
    reference = Reference(family, save_llava(family, tmp_path))
    expected = torch.stack(list(reference.model.model.get_image_features(squares(3)).pooler_output))
    shape = config(tmp_path)
    found = SquareFeatures(loader(tmp_path), shape, 64)(squares(3))
    assert found.shape == expected.shape == (3, num_tokens, 64)
    assert shape.num_tokens == num_tokens
    assert relative_error(found, expected) < 1e-4


@torch.inference_mode()
def test_projector_equals_the_reference(reference: Reference) -> None:
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(1))
    projector = Projector(loader(reference.folder), 48, 64, act="gelu", bias=True)
    assert relative_error(projector(x), reference.model.model.multi_modal_projector(x)) < 1e-5
    other = Projector(loader(reference.folder), 48, 64, act="silu", bias=True)
    assert relative_error(other(x), reference.model.model.multi_modal_projector(x)) > 1e-2


@pytest.mark.parametrize(("numbers", "loaded"), [((3,), 3), ((1,), 1), ((0,), 0), ((4, 1), 4)])
def test_only_layers_that_count_are_loaded(reference: Reference, numbers: tuple[int, ...], loaded: int) -> None:
    layers = loader(reference.folder)
    ClipVit(layers, config(reference.folder).tower, numbers)
    taken = {name.split(".")[3] for name in layers.reader._taken if name.startswith("vision.encoder.layers.")}
    assert taken == {str(i) for i in range(loaded)}
    with pytest.raises(SetupError) as caught:
        layers.reader.finish()
    assert "vision." not in str(caught.value)


@pytest.mark.parametrize(
    ("selected", "numbers"),
    [(-2, (23,)), (-1, (24,)), (0, (0,)), (24, (24,)), (-25, (0,)), ([-2, -5, 7], (23, 20, 7))],
)
def test_hidden_states_are_counted_as_the_reference_does(selected: int | list[int], numbers: tuple[int, ...]) -> None:
    assert hidden_state_numbers(selected, 24) == numbers


@pytest.mark.parametrize("selected", [25, -26, [-2, 30]])
def test_a_layer_that_is_not_there_is_named(selected: int | list[int]) -> None:
    with pytest.raises(SetupError, match=r"vision_feature_layer (25|-26|30) .* 24 layers"):
        hidden_state_numbers(selected, 24)


def test_published_configuration() -> None:
    found = SquareFeaturesConfig.from_hf(_PUBLISHED)
    assert found.num_tokens == 576
    assert found.hidden_states == (23,)
    assert found.tower == VitConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
        image_size=336,
        patch_size=14,
        hidden_act="quick_gelu",
        layer_norm_eps=1e-5,
    )


def test_what_a_configuration_leaves_out_is_as_usual() -> None:
    bare = SquareFeaturesConfig.from_hf({"vision_config": {}})
    assert bare == replace(SquareFeaturesConfig.from_hf(_PUBLISHED), tower=USUAL_CLIP, hidden_states=(11,))
    assert USUAL_CLIP.num_patches == 49


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ({"vision_feature_select_strategy": "cls"}, "vision_feature_select_strategy 'cls'"),
        ({"vision_config": {"model_type": "pixtral"}}, "'pixtral' is not supported"),
    ],
)
def test_what_is_not_supported_is_named(more: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SetupError, match=complaint):
        SquareFeaturesConfig.from_hf({**_PUBLISHED, **more})


def test_an_activation_of_the_projector_that_is_unknown_is_named(reference: Reference) -> None:
    with pytest.raises(SetupError, match="swish9"):
        Projector(loader(reference.folder), 48, 64, act="swish9", bias=True)
