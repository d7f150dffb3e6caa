from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_qwen_vl import FAMILIES, Reference, save_qwen_vl
from vision_driver import PICTURE_SIZES, random_picture, relative_error

from mmserve.errors import SetupError
from mmserve.vision.patches import PixelPatches
from mmserve.vision.qwen_grid import interpolation_taps, pack_grids, plan_grid
from mmserve.vision.qwen_vit import QwenVit, QwenVitConfig
from mmserve.weights.checkpoint import open_checkpoint
from mmserve.weights.layer_loader import LayerLoader
from mmserve.weights.loader import WeightReader

# A window of published size, more of them than one, heads of an uncommon size.
_LARGER = {
    "qwen2_vl": {"embed_dim": 48, "num_heads": 4},
    "qwen2_5_vl": {"hidden_size": 48, "num_heads": 4, "window_size": 112},
    "qwen3_vl": {"hidden_size": 48, "num_heads": 4, "num_position_embeddings": 2304},
}
_PUBLISHED: dict[str, tuple[dict[str, Any], QwenVitConfig]] = {
    "qwen2_vl": (
        {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3, "hidden_size": 1536}
        | {"patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "temporal_patch_size": 2},
        QwenVitConfig(
            depth=32,
            hidden_size=1280,
            intermediate_size=5120,
            num_heads=16,
            out_hidden_size=1536,
            patch_size=14,
            activation="quick_gelu",
        ),
    ),
    "qwen2_5_vl": (
        {"depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16}
        | {"in_chans": 3, "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2, "window_size": 112}
        | {"fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2, "temporal_patch_size": 2},
        QwenVitConfig(
            depth=32,
            hidden_size=1280,
            intermediate_size=3420,
            num_heads=16,
            out_hidden_size=3584,
            patch_size=14,
            activation="silu",
            rms_norm=True,
            gated=True,
            window=4,
            full_layers=frozenset({7, 15, 23, 31}),
        ),
    ),
    "qwen3_vl": (
        {"deepstack_visual_indexes": [8, 16, 24], "depth": 27, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152}
        | {"in_channels": 3, "intermediate_size": 4304, "num_heads": 16, "num_position_embeddings": 2304}
        | {"out_hidden_size": 4096, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2},
        QwenVitConfig(
            depth=27,
            hidden_size=1152,
            intermediate_size=4304,
            num_heads=16,
            out_hidden_size=4096,
            patch_size=16,
            activation="gelu_pytorch_tanh",
            patch_bias=True,
            position_table_side=48,
            deepstack_layers=(8, 16, 24),
        ),
    ),
}


@pytest.fixture(scope="module", params=FAMILIES)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = save_qwen_vl(request.param, tmp_path_factory.mktemp(request.param), vision=_LARGER[request.param])
    return Reference(request.param, folder)


def encoder(reference: Reference, dtype: torch.dtype = torch.float32) -> QwenVit:
    checkpoint = open_checkpoint(str(reference.folder))
    loader = LayerLoader(WeightReader(checkpoint), dtype, torch.device("cpu"))
    return QwenVit(loader, QwenVitConfig.from_hf(reference.family, checkpoint.config["vision_config"]))


def page(reference: Reference, rows: int, columns: int, seed: int = 0) -> PixelPatches:
    patch_size = FAMILIES[reference.family][3]
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(rows * columns, 3 * 2 * patch_size**2, generator=generator)
    return PixelPatches(pixels, (1, rows, columns))


@torch.inference_mode()
def reference_features(model: Any, images: list[PixelPatches]) -> list[torch.Tensor]:
    output = model.model.get_image_features(
        torch.cat([image.pixels for image in images]), torch.tensor([image.layout for image in images])
    )
    deepstack = getattr(output, "deepstack_features", None) or []
    parts = [output.pooler_output, *deepstack]
    return [torch.cat(image, dim=1) for image in zip(*parts, strict=True)]


@torch.inference_mode()
def test_packed_batch_of_all_sizes_equals_the_reference(reference: Reference) -> None:
    images = [random_picture(i, width, height) for i, (width, height) in enumerate(PICTURE_SIZES)]
    images.append(random_picture(9, 150, 90, grey=True))
    patches = [reference.picture(image).items[0].patches for image in images]
    patches += [page(reference, 34, 46), page(reference, 16, 24, seed=1), page(reference, 16, 24, seed=2)]
    found = encoder(reference)(patches)
    expected = reference_features(reference.model, patches)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert relative_error(ours, theirs) < 1e-4


@torch.inference_mode()
def test_neighbours_in_the_batch_change_nothing(reference: Reference) -> None:
    model, images = encoder(reference), [page(reference, 10, 18, seed=i) for i in range(3)]
    for alone, together in zip([model([image])[0] for image in images], model(images), strict=True):
        assert relative_error(together, alone) < 1e-5


@torch.inference_mode()
def test_the_error_shows_a_lost_window_position_or_feature(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, image = encoder(reference), page(reference, 34, 46)
    right = model([image])[0]
    if reference.family == "qwen2_5_vl":
        monkeypatch.setattr(model, "_config", replace(model._config, full_layers=frozenset(range(3))))
    elif reference.family == "qwen3_vl":
        assert model._position_table is not None
        monkeypatch.setattr(model, "_position_table", model._position_table.flip(0))
    else:
        monkeypatch.setattr(model, "_rotary", lambda positions: QwenVit._rotary(model, positions.flip(1)))
        model._plan.cache_clear()
    assert relative_error(model([image])[0], right) > 1e-2


@torch.inference_mode()
def test_bfloat16_is_as_near_as_the_reference_in_bfloat16(reference: Reference) -> None:
    image = page(reference, 34, 46)
    exact = reference_features(reference.model, [image])[0]
    ours = encoder(reference, torch.bfloat16)([image])[0]
    assert ours.dtype is torch.bfloat16
    reference.model.to(torch.bfloat16)
    try:
        theirs = reference_features(reference.model, [image])[0]
    finally:
        reference.model.to(torch.float32)
    assert relative_error(ours.float(), exact) < 1.3 * relative_error(theirs.float(), exact)


@pytest.mark.parametrize("family", FAMILIES)
def test_published_configurations(family: str) -> None:
    vision, expected = _PUBLISHED[family]
    assert QwenVitConfig.from_hf(family, vision) == expected


def test_an_unknown_activation_is_named(tmp_path: Path) -> None:
    reference = Reference("qwen2_vl", save_qwen_vl("qwen2_vl", tmp_path))
    checkpoint = open_checkpoint(str(reference.folder))
    config = QwenVitConfig.from_hf("qwen2_vl", {**checkpoint.config["vision_config"], "hidden_act": "swish9"})
    with pytest.raises(SetupError, match="swish9"):
        QwenVit(LayerLoader(WeightReader(checkpoint), torch.float32, torch.device("cpu")), config)


def test_windows_are_ordered_by_size_and_cover_every_block_once() -> None:
    grid = plan_grid(12, 22, 2, 4)
    assert sorted(grid.order.tolist()) == list(range(6 * 11))
    # 6 x 11 blocks in windows of 4 x 4: sides 4 and 2 by 4, 4 and 3.
    assert grid.window_lengths == (2 * 3 * 4, 2 * 4 * 4, 2 * 4 * 4, 4 * 3 * 4, 4 * 4 * 4, 4 * 4 * 4)
    first = grid.positions[: 2 * 3 * 4]
    assert first[:, 0].min() == 8
    assert first[:, 1].min() == 16


def test_without_windows_patches_stay_where_they_are() -> None:
    grid = plan_grid(4, 6, 2, None)
    assert grid.order.tolist() == list(range(6))
    assert grid.window_lengths == (24,)
    assert grid.positions[:8].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]


def test_a_shape_is_planned_once() -> None:
    assert plan_grid(8, 6, 2, 3) is plan_grid(8, 6, 2, 3)
    assert interpolation_taps(8, 6, 2, 5)[0] is interpolation_taps(8, 6, 2, 5)[0]


def test_orders_of_a_batch_do_not_mix_images() -> None:
    packed = pack_grids([(4, 4), (6, 4)], 2, 2, torch.device("cpu"))
    assert sorted(packed.order[:4].tolist()) == [0, 1, 2, 3]
    assert sorted(packed.order[4:].tolist()) == list(range(4, 10))
    assert packed.image_lengths == (16, 24)
    assert sum(packed.window_lengths) == 40
