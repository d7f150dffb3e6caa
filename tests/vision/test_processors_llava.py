import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from picture_samples import (
    MARKUP,
    NO_LIMITS,
    SAMPLES,
    SIZES,
    byte_difference,
    load,
    markup_tokenizer,
    picture,
    plan,
    process,
)
from PIL import Image
from transformers import PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor as ReferenceLlava
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_next.modeling_llava_next import LlavaNextModel
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor as ReferenceNext
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.llava_onevision.modeling_llava_onevision import LlavaOnevisionModel
from transformers.models.llava_onevision.processing_llava_onevision import (
    LlavaOnevisionProcessor as ReferenceOnevision,
)
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from mmserve.errors import RequestError, SetupError
from mmserve.vision.anyres import TileGrid, grid_of_tiles
from mmserve.vision.image_plan import ImageProcessor, settings_digest
from mmserve.vision.image_source import PixelLimits
from mmserve.vision.preprocess import load_processor
from mmserve.weights.dummy import DummyCheckpoint
from mmserve.weights.model_files import read_processor_config

IMAGE_TOKEN = markup_tokenizer().encode("<image>")[0]
CLIP_336: dict[str, Any] = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 336},
    "crop_size": {"height": 336, "width": 336},
}
NEXT = CLIP_336 | {"image_processor_type": "LlavaNextImageProcessor"}
ONEVISION: dict[str, Any] = {
    "image_processor_type": "LlavaOnevisionImageProcessor",
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
SIGLIP_384: dict[str, Any] = {
    "image_processor_type": "SiglipImageProcessor",
    "size": {"height": 384, "width": 384},
}
CLIP_ENCODER = {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14}
SIGLIP_ENCODER = {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 14}


def options(settings_: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings_.items() if key != "image_processor_type"}


def llava(settings_: dict[str, Any], **config: Any) -> ImageProcessor:
    return load(
        {"model_type": "llava", "image_token_index": IMAGE_TOKEN, "vision_config": CLIP_ENCODER, **config}, settings_
    )


def llava_next() -> ImageProcessor:
    config = {"model_type": "llava_next", "image_token_index": IMAGE_TOKEN, "vision_config": CLIP_ENCODER}
    return load(config, NEXT)


def onevision() -> ImageProcessor:
    config = {"model_type": "llava_onevision", "image_token_index": IMAGE_TOKEN, "vision_config": SIGLIP_ENCODER}
    return load(config, ONEVISION)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=markup_tokenizer()._backend, pad_token=MARKUP[3])


# LLaVA-1.5


@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize(("size", "mode"), SAMPLES)
def test_llava_pixels_equal_the_reference(size: tuple[int, int], mode: str, pads: bool) -> None:
    image = picture(size, mode)
    settings_ = CLIP_336 | {"image_processor_type": "LlavaImageProcessor", "do_pad": pads}
    expected = LlavaImageProcessorPil(**options(settings_))(image, return_tensors="pt")["pixel_values"]
    [patches] = process(llava(settings_), image)
    assert byte_difference(patches.pixels, expected, 0.27) < 0.01
    assert patches.layout == ()


@pytest.mark.parametrize("size", SIZES)
def test_clip_pixels_equal_the_reference(size: tuple[int, int]) -> None:
    expected = CLIPImageProcessorPil(**options(CLIP_336))(picture(size), return_tensors="pt")["pixel_values"]
    [patches] = process(llava(CLIP_336), picture(size))
    assert byte_difference(patches.pixels, expected, 0.27) < 0.01


@pytest.mark.parametrize("size", SIZES)
def test_siglip_pixels_equal_the_reference(size: tuple[int, int]) -> None:
    """Stretched to the square, other means."""
    processor = llava(SIGLIP_384, vision_config=SIGLIP_ENCODER, vision_feature_select_strategy="full")
    expected = SiglipImageProcessorPil(**options(SIGLIP_384))(picture(size), return_tensors="pt")["pixel_values"]
    [patches] = process(processor, picture(size))
    assert byte_difference(patches.pixels, expected, 0.5) < 0.01
    assert plan(processor, picture(size)).num_tokens == 27 * 27


@pytest.mark.parametrize("strategy", ["default", "full"])
def test_llava_placeholders_equal_the_reference(tokenizer: PreTrainedTokenizerFast, strategy: str) -> None:
    reference = ReferenceLlava(
        LlavaImageProcessorPil(**options(CLIP_336)),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy=strategy,
        num_additional_image_tokens=1,
    )
    image = picture((640, 480))
    processor = llava(CLIP_336, vision_feature_select_strategy=strategy)
    assert processor.placeholder_ids(plan(processor, image)) == expansion(reference, image)


def test_llava_takes_no_limits() -> None:
    processor = llava(CLIP_336)
    assert processor.plan(640, 480, PixelLimits(max_pixels=1)).num_tokens == 576


def expansion(reference: Any, image: Image.Image) -> list[int]:
    """What the reference writes for the image, between two letters."""
    ids: list[int] = reference(images=[image], text=["x<image>y"], return_tensors="pt")["input_ids"][0].tolist()
    return ids[1:-1]


# LLaVA-NeXT


@pytest.mark.parametrize(("size", "mode"), SAMPLES)
def test_next_pixels_equal_the_reference(size: tuple[int, int], mode: str) -> None:
    image = picture(size, mode)
    expected = LlavaNextImageProcessorPil(**options(NEXT))(image, return_tensors="pt")
    [patches] = process(llava_next(), image)
    assert byte_difference(patches.pixels, expected["pixel_values"][0], 0.27) < 0.01
    assert patches.layout == tuple(expected["image_sizes"][0].tolist())


@pytest.mark.parametrize("size", SIZES)
def test_next_placeholders_equal_the_reference(tokenizer: PreTrainedTokenizerFast, size: tuple[int, int]) -> None:
    reference = ReferenceNext(
        LlavaNextImageProcessorPil(**options(NEXT)),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    processor = llava_next()
    assert processor.placeholder_ids(plan(processor, picture(size))) == expansion(reference, picture(size))


@settings(max_examples=200, deadline=None)
@given(width=st.integers(1, 3000), height=st.integers(1, 3000))
def test_next_tokens_equal_the_model_features(width: int, height: int) -> None:
    """Counted on what the model itself makes of one feature for each patch."""
    if max(width, height) > 200 * min(width, height):
        return
    processor = llava_next()
    planned = processor.plan(width, height, NO_LIMITS)
    rows, columns = planned.choices
    assert planned.num_tokens == next_features(height, width, rows * columns + 1)


def next_features(height: int, width: int, num_tiles: int) -> int:
    config = SimpleNamespace(
        vision_config=SimpleNamespace(image_size=336, patch_size=14),
        image_grid_pinpoints=LlavaNextImageProcessorPil.image_grid_pinpoints,
    )
    features = torch.zeros(num_tiles, 576, 1)
    _, [length] = LlavaNextModel.pack_image_features(
        SimpleNamespace(config=config), [features], [(height, width)], "default", torch.zeros(1)
    )
    return int(length)


@pytest.mark.parametrize("size", [(640, 480), (1240, 1754), (3000, 200), (200, 3000)])
@pytest.mark.parametrize("max_tiles", [1, 2, 3, 4, 5])
def test_next_limits_leave_out_large_grids(size: tuple[int, int], max_tiles: int) -> None:
    processor, image = llava_next(), picture(size)
    limits = PixelLimits(max_pixels=max_tiles * 336 * 336 + 1)
    planned = plan(processor, image, limits)
    [patches] = process(processor, image, limits)
    assert 1 <= patches.pixels.shape[0] <= max_tiles
    assert patches.pixels.shape[0] == planned.choices[0] * planned.choices[1] + 1
    assert planned.num_tokens <= 576 * max_tiles + 48


def test_next_lone_overview_ends_in_a_newline() -> None:
    planned = llava_next().plan(640, 480, PixelLimits(max_pixels=336 * 336))
    assert planned.num_tokens == 577 == next_features(480, 640, num_tiles=1)
    assert planned.digest != llava_next().plan(640, 480, NO_LIMITS).digest


@given(width=st.integers(20, 3000), height=st.integers(20, 3000), max_tiles=st.integers(3, 5))
def test_the_grid_is_known_from_the_number_of_tiles(width: int, height: int, max_tiles: int) -> None:
    planned = llava_next().plan(width, height, PixelLimits(max_pixels=max_tiles * 336 * 336))
    grid = TileGrid(*planned.choices)
    resolutions = LlavaNextImageProcessorPil.image_grid_pinpoints
    assert grid_of_tiles(height, width, resolutions, 336, grid.num_tiles) == grid


# LLaVA-OneVision


@pytest.mark.parametrize(("size", "mode"), SAMPLES)
def test_onevision_pixels_equal_the_reference(size: tuple[int, int], mode: str) -> None:
    image = picture(size, mode)
    expected = LlavaOnevisionImageProcessorPil(**options(ONEVISION))(image, return_tensors="pt")
    [patches] = process(onevision(), image)
    assert byte_difference(patches.pixels, expected["pixel_values"][0], 0.5) < 0.01
    assert patches.layout == tuple(expected["image_sizes"][0].tolist())


@settings(max_examples=200, deadline=None)
@given(width=st.integers(1, 4000), height=st.integers(1, 4000))
def test_onevision_tokens_equal_the_reference(width: int, height: int) -> None:
    """By the processor, which needs torchvision as a whole, and by what the model makes of its features."""
    if max(width, height) > 200 * min(width, height):
        return
    reference = SimpleNamespace(
        image_processor=LlavaOnevisionImageProcessorPil,
        num_image_tokens=729,
        vision_aspect_ratio="anyres_max_9",
    )
    reference._get_unpadded_features = ReferenceOnevision._get_unpadded_features.__get__(reference)
    planned = onevision().plan(width, height, NO_LIMITS)
    rows, columns = planned.choices
    assert planned.num_tokens == ReferenceOnevision._get_number_of_features(reference, height, width, 384, 384)
    assert planned.num_tokens == onevision_features(height, width, rows * columns + 1)


def onevision_features(height: int, width: int, num_tiles: int) -> int:
    config = SimpleNamespace(
        vision_config=SimpleNamespace(image_size=384, patch_size=14),
        image_grid_pinpoints=LlavaOnevisionImageProcessorPil.image_grid_pinpoints,
    )
    _, [length] = LlavaOnevisionModel.pack_image_features(
        SimpleNamespace(config=config), [torch.zeros(num_tiles, 729, 1)], [(height, width)], torch.zeros(1)
    )
    return int(length)


@pytest.mark.parametrize("size", [(640, 480), (200, 3000), (384, 384)])
def test_onevision_lone_overview_equals_the_reference_with_several_pictures(size: tuple[int, int]) -> None:
    image, limits = picture(size), PixelLimits(max_pixels=384 * 384)
    both = LlavaOnevisionImageProcessorPil(**options(ONEVISION))([[image, image]], return_tensors="pt")
    [patches] = process(onevision(), image, limits)
    assert byte_difference(patches.pixels, both["pixel_values"][0], 0.5) < 0.01
    assert plan(onevision(), image, limits).num_tokens == 730 == onevision_features(480, 640, num_tiles=1)


# All of them


@pytest.mark.parametrize("make", [lambda: llava(CLIP_336), llava_next, onevision])
def test_a_strip_is_refused(make: Any) -> None:
    with pytest.raises(RequestError, match="at most 200 times"):
        make().plan(1, 201, NO_LIMITS)


def test_the_longest_strip_is_cut_without_scaling_all_of_it() -> None:
    """At 336 pixels its shortest edge would make it 67,200 pixels long."""
    [patches] = process(llava(CLIP_336), picture((400, 2)))
    assert patches.pixels.shape == (1, 3, 336, 336)


def test_digests_differ_between_families_and_settings() -> None:
    processors = [
        llava(CLIP_336),
        llava(CLIP_336 | {"resample": 2}),
        llava(CLIP_336 | {"do_normalize": False}),
        llava_next(),
        onevision(),
    ]
    assert len({settings_digest(processor) for processor in processors}) == len(processors)


@pytest.mark.parametrize(
    ("model_type", "settings_", "complaint"),
    [
        ("llava", CLIP_336 | {"image_processor_type": "PixtralImageProcessor"}, "PixtralImageProcessor"),
        ("llava", CLIP_336 | {"resample": 0}, "resample: 0"),
        ("llava", CLIP_336 | {"do_resize": False}, "do_resize"),
        ("llava", CLIP_336 | {"crop_size": 224}, "pictures of 224 pixels, while the encoder takes 336"),
        ("llava_next", NEXT | {"image_grid_pinpoints": [[336, 672]]}, "image_grid_pinpoints unlike config"),
        ("llava", {}, r"no preprocessor_config\.json"),
        ("mllama", CLIP_336, "'mllama' models are not supported"),
    ],
)
def test_unknown_processors_and_settings_are_named(model_type: str, settings_: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SetupError, match=complaint):
        load({"model_type": model_type, "vision_config": CLIP_ENCODER}, settings_)


def test_a_text_model_has_no_processor() -> None:
    checkpoint = DummyCheckpoint({"model_type": "llama"}, {}, markup_tokenizer)
    assert load_processor(checkpoint, checkpoint.tokenizer()) is None


@pytest.mark.parametrize("is_nested", [False, True])
def test_settings_come_from_either_file(tmp_path: Path, is_nested: bool) -> None:
    if is_nested:
        (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": NEXT, "patch_size": 14}))
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "old"}))
    else:
        (tmp_path / "processor_config.json").write_text(json.dumps({"patch_size": 14}))
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(NEXT))
    assert read_processor_config(tmp_path) == NEXT
