"""What LLaVA's pictures become, against transformers: tiles put together, padding cut off, newlines, pooling."""

from pathlib import Path
from typing import Any

import pytest
import torch
from reference_llava import FAMILIES, MAX_TILES, PATCHES_A_SIDE, TILE, Reference, save_llava
from vision_driver import PICTURE_SIZES, Item, Picture, random_picture, relative_error

from mmserve.attention.torch_backend import TorchAttention
from mmserve.config import ModelConfig
from mmserve.errors import SetupError
from mmserve.models.llava import Llava
from mmserve.models.llava_next import LlavaNext
from mmserve.models.llava_onevision import LlavaOnevision
from mmserve.models.registry import model_class
from mmserve.vision.image_source import PixelLimits
from mmserve.vision.processors import llava_next, llava_onevision
from mmserve.weights.checkpoint import open_checkpoint
from mmserve.weights.dummy import DummyCheckpoint, byte_level_tokenizer
from mmserve.weights.layer_loader import LayerLoader
from mmserve.weights.loader import WeightReader

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=FAMILIES)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    family = FAMILIES[request.param]
    return Reference(family, save_llava(family, tmp_path_factory.mktemp(request.param)))


def attention(config: ModelConfig) -> TorchAttention:
    return TorchAttention(
        num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, block_size=16, dtype=torch.float32
    )


def load(reference: Reference, **changes: Any) -> Llava:
    checkpoint = open_checkpoint(str(reference.folder))
    config = ModelConfig.from_hf({**checkpoint.config, **changes})
    backend = attention(config)
    model = model_class(config.architecture)(LayerLoader(WeightReader(checkpoint), torch.float32, CPU), config, backend)
    assert isinstance(model, Llava)
    return model


def encode(model: Llava, pictures: list[Picture]) -> list[torch.Tensor]:
    return model.encode_images([picture.items[0].patches for picture in pictures])


def lone_overview(reference: Reference, image: torch.Tensor) -> Picture:
    """As a limit of one tile makes it."""
    limits = PixelLimits(max_pixels=TILE * TILE)
    plan = reference.processor.plan(image.shape[1], image.shape[0], limits)
    [patches] = reference.processor.process(image, plan)
    return Picture(reference.processor.placeholder_ids(plan), (Item(patches, plan.num_tokens),))


def images() -> list[torch.Tensor]:
    sizes = (*PICTURE_SIZES, (200, 3000), (56, 56), (168, 112), (333, 331))
    return [random_picture(i, width, height, grey=i % 3 == 1) for i, (width, height) in enumerate(sizes)]


@torch.inference_mode()
def test_packed_batch_of_all_sizes_equals_the_reference(reference: Reference) -> None:
    pictures = [reference.picture(image) for image in images()]
    found, expected = encode(load(reference), pictures), reference.features(pictures)
    for ours, theirs, picture in zip(found, expected, pictures, strict=True):
        assert ours.shape == theirs.shape == (len(picture.placeholder_ids), 64)
        assert relative_error(ours, theirs) < 1e-4


@torch.inference_mode()
def test_neighbours_in_the_batch_change_nothing(reference: Reference) -> None:
    model, pictures = load(reference), [reference.picture(image) for image in images()]
    for picture, together in zip(pictures, encode(model, pictures), strict=True):
        assert relative_error(together, encode(model, [picture])[0]) < 1e-5


@torch.inference_mode()
def test_a_lone_overview_ends_in_a_newline(reference: Reference) -> None:
    """The reference takes overviews alone only in LLaVA-OneVision, with several pictures in a prompt."""
    pictures = [lone_overview(reference, image) for image in images()[:3]]
    pixels = torch.cat([picture.items[0].patches.pixels for picture in pictures])
    assert pixels.shape == (3, 3, TILE, TILE)
    found = encode(load(reference), pictures)
    features = reference.model.model.vision_tower(pixels, output_hidden_states=True).hidden_states
    layer, start = (-1, 0) if reference.family is FAMILIES["llava_onevision"] else (-2, 1)
    tokens = reference.model.model.multi_modal_projector(features[layer][:, start:])
    for ours, theirs in zip(found, tokens, strict=True):
        if reference.family is not FAMILIES["llava"]:
            theirs = torch.cat((theirs, reference.model.model.image_newline[None]))
        assert ours.shape == theirs.shape
        assert relative_error(ours, theirs) < 1e-4


@torch.inference_mode()
def test_several_pictures_without_tiles_equal_the_reference(tmp_path: Path) -> None:
    reference = Reference(FAMILIES["llava_onevision"], save_llava(FAMILIES["llava_onevision"], tmp_path))
    pictures = [lone_overview(reference, image) for image in images()[:3]]
    patches = [picture.items[0].patches for picture in pictures]
    expected = reference.model.model.get_image_features(
        torch.cat([image.pixels for image in patches]),
        torch.tensor([image.layout for image in patches]),
        batch_num_images=torch.tensor([3]),
    ).pooler_output
    for ours, theirs in zip(encode(load(reference), pictures), expected, strict=True):
        assert relative_error(ours, theirs) < 1e-4


@torch.inference_mode()
def test_pictures_cover_every_way_of_putting_tiles_together(reference: Reference) -> None:
    """Padding above, beside and none; nothing but padding; pooled and not."""
    if reference.family is FAMILIES["llava"]:
        assert {len(reference.picture(image).placeholder_ids) for image in images()} == {PATCHES_A_SIDE**2}
        return
    counts = [len(reference.picture(image).placeholder_ids) for image in images()]
    tiles = [reference.picture(image).items[0].patches.pixels.shape[0] for image in images()]
    assert min(counts) == PATCHES_A_SIDE**2
    assert len(set(counts)) >= 5
    assert max(tiles) > 3
    if reference.family is FAMILIES["llava_onevision"]:
        pooled = PATCHES_A_SIDE**2 * (1 + MAX_TILES) + 2 * PATCHES_A_SIDE
        assert any(tile > MAX_TILES + 1 and count <= pooled for tile, count in zip(tiles, counts, strict=True))
        assert relative_error(*_with_other_pooling(reference)) > 1e-2


def _with_other_pooling(reference: Reference) -> tuple[torch.Tensor, torch.Tensor]:
    model, square = load(reference), [reference.picture(images()[-1])]
    right = encode(model, square)[0]
    assert isinstance(model, LlavaOnevision)
    scaled = model._scaled
    model._scaled = lambda picture: scaled(picture.flip(0))  # type: ignore[method-assign]
    return encode(model, square)[0], right


@pytest.mark.parametrize("name", ["llava_next", "llava_onevision"])
def test_tiles_need_a_token_a_patch(tmp_path: Path, name: str) -> None:
    reference = Reference(FAMILIES[name], save_llava(FAMILIES[name], tmp_path))
    wrong = "full" if name == "llava_next" else "default"
    with pytest.raises(SetupError, match=r"vision_feature_select_strategy .* one token a patch"):
        load(reference, vision_feature_select_strategy=wrong)


@pytest.mark.parametrize(
    ("architecture", "kind", "resolutions"),
    [
        ("LlavaNextForConditionalGeneration", LlavaNext, llava_next.RESOLUTIONS),
        ("LlavaOnevisionForConditionalGeneration", LlavaOnevision, llava_onevision.RESOLUTIONS),
    ],
)
def test_a_configuration_without_resolutions_means_the_published_ones(
    architecture: str, kind: type[LlavaNext], resolutions: tuple[tuple[int, int], ...]
) -> None:
    text = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 1}
    config = {
        "architectures": [architecture],
        "text_config": {**text, "num_attention_heads": 1},
        "vision_config": {**vision, "image_size": 336 if kind is LlavaNext else 384, "patch_size": 14},
    }
    checkpoint = DummyCheckpoint(config, {}, byte_level_tokenizer)
    shape = ModelConfig.from_hf(config)
    backend = attention(shape)
    model = model_class(architecture)(LayerLoader(WeightReader(checkpoint), torch.float32, CPU), shape, backend)
    assert isinstance(model, kind)
    assert model._resolutions == resolutions
