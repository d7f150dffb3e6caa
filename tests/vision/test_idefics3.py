"""Idefics3's and SmolVLM's encoder and connector against transformers'."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from reference_idefics3 import FAMILIES, Reference, save_idefics3
from vision_driver import PICTURE_SIZES, random_picture, relative_error

from mmserve.vision.idefics3 import USUAL_IDEFICS3, Idefics3Encoder, position_ids
from mmserve.vision.patches import PixelPatches
from mmserve.weights.checkpoint import open_checkpoint
from mmserve.weights.layer_loader import LayerLoader
from mmserve.weights.loader import WeightReader

# As published with Idefics3-8B-Llama3 and SmolVLM-256M, and what they mean.
_PUBLISHED = {
    "idefics3": (
        {"hidden_size": 1152, "image_size": 364, "intermediate_size": 4304, "model_type": "idefics3"}
        | {"num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14},
        replace(USUAL_IDEFICS3, intermediate_size=4304, num_hidden_layers=27, image_size=364, patch_size=14),
    ),
    "smolvlm": (
        {"hidden_size": 768, "image_size": 512, "max_image_size": {"longest_edge": 512}, "model_type": "idefics3"}
        | {"num_attention_heads": 12, "patch_size": 16, "size": {"longest_edge": 2048}, "use_base_siglip": False},
        replace(USUAL_IDEFICS3, hidden_size=768, num_attention_heads=12, image_size=512, patch_size=16),
    ),
}


@pytest.fixture(scope="module", params=FAMILIES)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(request.param, save_idefics3(request.param, tmp_path_factory.mktemp(request.param)))


def encoder(reference: Reference, dtype: torch.dtype = torch.float32) -> Idefics3Encoder:
    checkpoint = open_checkpoint(str(reference.folder))
    loader = LayerLoader(WeightReader(checkpoint), dtype, torch.device("cpu"))
    return Idefics3Encoder(loader, checkpoint.config, 64)


def tiles(reference: Reference) -> list[PixelPatches]:
    """Of pictures of all sizes, and a grey one."""
    images = [random_picture(i, width, height) for i, (width, height) in enumerate(PICTURE_SIZES)]
    images.append(random_picture(9, 150, 90, grey=True))
    return [item.patches for image in images for item in reference.picture(image).items]


@torch.inference_mode()
def reference_features(model: Any, patches: list[PixelPatches]) -> list[torch.Tensor]:
    pixels = torch.cat([tile.pixels for tile in patches])[None]
    features = torch.cat(model.model.get_image_features(pixels).pooler_output)
    return list(features.view(len(patches), -1, features.shape[-1]))


@torch.inference_mode()
def test_packed_batch_of_all_sizes_equals_the_reference(reference: Reference) -> None:
    patches = tiles(reference)
    found, expected = encoder(reference)(patches), reference_features(reference.model, patches)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert relative_error(ours, theirs) < 1e-4


@torch.inference_mode()
def test_token_counts_are_what_the_plan_says(reference: Reference) -> None:
    for seed, (width, height) in enumerate(PICTURE_SIZES):
        picture = reference.picture(random_picture(seed, width, height))
        features = reference_features(reference.model, [item.patches for item in picture.items])
        assert [item.num_tokens for item in picture.items] == [tokens.shape[0] for tokens in features]


@torch.inference_mode()
def test_neighbours_in_the_batch_change_nothing(reference: Reference) -> None:
    model, patches = encoder(reference), tiles(reference)[:3]
    for alone, together in zip([model([p])[0] for p in patches], model(patches), strict=True):
        assert relative_error(together, alone) < 1e-5


@torch.inference_mode()
def test_the_error_shows_moved_patches_and_lost_positions(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tile = encoder(reference), tiles(reference)[0]
    right = model([tile])[0]
    turned = PixelPatches(tile.pixels.transpose(2, 3).contiguous(), tile.layout)
    assert relative_error(model([turned])[0], right) > 1e-2
    monkeypatch.setattr(model._tower, "_positions", model._tower._positions.flip(0))
    assert relative_error(model([tile])[0], right) > 1e-2


@torch.inference_mode()
def test_bfloat16_is_as_near_as_the_reference_in_bfloat16(reference: Reference) -> None:
    patches = tiles(reference)[:4]
    exact = torch.cat(reference_features(reference.model, patches))
    ours = torch.cat(encoder(reference, torch.bfloat16)(patches))
    assert ours.dtype is torch.bfloat16
    reference.model.to(torch.bfloat16)
    try:
        theirs = torch.cat(reference_features(reference.model, patches))
    finally:
        reference.model.to(torch.float32)
    assert relative_error(ours.float(), exact) < 1.3 * relative_error(theirs.float(), exact)


@pytest.mark.parametrize("table", [26, 27, 32, 70])
def test_positions_of_any_tile_fall_where_the_reference_puts_them(table: int) -> None:
    """Fractions on a bound go to the side that float32 puts them on, which is not that of exact arithmetic."""
    from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionConfig, Idefics3VisionEmbeddings

    config = Idefics3VisionConfig(hidden_size=1, patch_size=1, image_size=table, num_channels=1)
    embeddings = Idefics3VisionEmbeddings(config)
    with torch.no_grad():
        embeddings.patch_embedding.weight.zero_()
        embeddings.patch_embedding.bias.zero_()
        embeddings.position_embedding.weight.copy_(torch.arange(table**2)[:, None])
        for side in (26, 27, 32, 70, table - 1, table, 2 * table, 1):
            found = embeddings(torch.zeros(1, 1, side, side), torch.ones(1, side, side, dtype=torch.bool))
            assert position_ids(side, table).tolist() == found.flatten().tolist()


def test_positions_are_found_once_a_shape() -> None:
    assert position_ids(5, 9) is position_ids(5, 9)


@pytest.mark.parametrize("family", FAMILIES)
def test_published_configurations(family: str) -> None:
    vision, expected = _PUBLISHED[family]
    assert USUAL_IDEFICS3.updated(vision) == expected
