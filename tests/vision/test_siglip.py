from pathlib import Path
from typing import Any

import pytest
import torch
from reference_llava import FAMILIES, VARIANTS, Reference, save_llava
from safetensors.torch import save_file
from vision_driver import relative_error
from vision_reference import randomize

from mmserve.vision.siglip import USUAL_SIGLIP, SiglipVit
from mmserve.vision.square_features import SquareFeatures, SquareFeaturesConfig
from mmserve.vision.vit import VitConfig
from mmserve.weights.checkpoint import open_checkpoint
from mmserve.weights.layer_loader import LayerLoader
from mmserve.weights.loader import WeightReader

# Of llava-hf/llava-onevision-qwen2-7b-ov-hf.
_PUBLISHED = {
    "model_type": "llava_onevision",
    "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152, "image_size": 384, "patch_size": 14}
    | {"intermediate_size": 4304, "num_attention_heads": 16, "num_hidden_layers": 26, "vision_use_head": False},
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
}


def loader(folder: Path) -> LayerLoader:
    return LayerLoader(WeightReader(open_checkpoint(str(folder))), torch.float32, torch.device("cpu"))


def pixels(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module", params=["llava_onevision", "llava with SigLIP"])
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Without and with the pooling head, which answers no question."""
    family = {**FAMILIES, **VARIANTS}[request.param]
    return Reference(family, save_llava(family, tmp_path_factory.mktemp("siglip")))


@pytest.mark.parametrize("numbers", [(0,), (2,), (3,), (1, 3)])
@torch.inference_mode()
def test_hidden_states_equal_the_reference(reference: Reference, numbers: tuple[int, ...]) -> None:
    output = reference.model.model.vision_tower(pixels(3, 3, 56, 56), output_hidden_states=True)
    expected = torch.cat([output.hidden_states[number] for number in numbers], dim=-1)
    config = SquareFeaturesConfig.from_hf(open_checkpoint(str(reference.folder)).config).tower
    found = SiglipVit(loader(reference.folder), config, numbers)(pixels(3, 3, 56, 56))
    assert found.shape == expected.shape == (3, 16, 32 * len(numbers))
    assert relative_error(found, expected) < 1e-4


@torch.inference_mode()
def test_tower_and_projector_equal_the_reference(reference: Reference) -> None:
    config = SquareFeaturesConfig.from_hf(open_checkpoint(str(reference.folder)).config)
    model = reference.model.model
    features = model.vision_tower(pixels(3, 3, 56, 56), output_hidden_states=True)
    expected = model.multi_modal_projector(features.hidden_states[config.hidden_states[0]])
    found = SquareFeatures(loader(reference.folder), config, 64)(pixels(3, 3, 56, 56))
    assert relative_error(found, expected) < 1e-4


@torch.inference_mode()
def test_behind_the_last_norm_equals_the_reference(reference: Reference) -> None:
    config = SquareFeaturesConfig.from_hf(open_checkpoint(str(reference.folder)).config).tower
    expected = reference.model.model.vision_tower(pixels(2, 3, 56, 56)).last_hidden_state
    found = SiglipVit(loader(reference.folder), config)(pixels(2, 3, 56, 56))
    assert relative_error(found, expected) < 1e-4
    before = SiglipVit(loader(reference.folder), config, (3,))(pixels(2, 3, 56, 56))
    assert relative_error(before, expected) > 1e-2


@torch.inference_mode()
def test_positions_of_a_picture_of_another_size(tmp_path: Path) -> None:
    """As Idefics3 finds them: by where a patch stands in its picture, not by its number."""
    from transformers import Idefics3VisionConfig
    from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionTransformer

    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "image_size": 56, "patch_size": 14}
    model: Any = Idefics3VisionTransformer(Idefics3VisionConfig(num_hidden_layers=2, **shape)).eval()
    randomize(model, 0)
    save_file({f"vision.{name}": weight for name, weight in model.state_dict().items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    used: list[torch.Tensor] = []
    table = model.embeddings.position_embedding
    table.register_forward_hook(lambda _module, arguments, _output: used.append(arguments[0]))
    wide = pixels(2, 3, 42, 84)
    expected = model(wide).last_hidden_state
    encoder = SiglipVit(loader(tmp_path), USUAL_SIGLIP.updated({"num_hidden_layers": 2, **shape}))
    [position_ids] = used
    assert position_ids[0].tolist() != list(range(18))
    assert relative_error(encoder(wide, position_ids), expected) < 1e-4
    assert relative_error(encoder(wide, position_ids[0]), expected) < 1e-4
    assert relative_error(encoder(wide, torch.arange(18) % 16), expected) > 1e-2


def test_published_configuration() -> None:
    found = SquareFeaturesConfig.from_hf(_PUBLISHED)
    assert found.num_tokens == 27 * 27
    assert found.hidden_states == (26,)
    assert found.tower == VitConfig(
        hidden_size=1152,
        intermediate_size=4304,
        num_hidden_layers=26,
        num_attention_heads=16,
        image_size=384,
        patch_size=14,
        hidden_act="gelu_pytorch_tanh",
        layer_norm_eps=1e-6,
    )


def test_families_say_what_a_configuration_leaves_out() -> None:
    bare = SquareFeaturesConfig.from_hf({"vision_config": {}}, layer=-1, strategy="full", tower="siglip_vision_model")
    assert bare.tower == USUAL_SIGLIP
    assert bare.hidden_states == (12,)
    assert bare.num_tokens == 14 * 14
