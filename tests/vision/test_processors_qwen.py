import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from picture_samples import NO_LIMITS, SAMPLES, SIZES, byte_difference, load, picture, plan, process
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from mmserve.errors import RequestError
from mmserve.vision.image_plan import settings_digest
from mmserve.vision.image_source import PixelLimits

IMAGE_TOKEN = 151655
# As published for Qwen2.5-VL and Qwen3-VL.
QWEN2_5 = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
}
QWEN3 = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
CONFIGS = {"qwen2_5_vl": QWEN2_5, "qwen3_vl": QWEN3}


def config(model_type: str) -> dict[str, object]:
    return {"model_type": model_type, "image_token_id": IMAGE_TOKEN, "vision_config": {}}


def reference_for(model_type: str) -> Qwen2VLImageProcessorPil:
    return Qwen2VLImageProcessorPil(
        **{key: value for key, value in CONFIGS[model_type].items() if key != "image_processor_type"}
    )


@pytest.mark.parametrize("model_type", CONFIGS)
@pytest.mark.parametrize(("size", "mode"), SAMPLES)
def test_patches_equal_the_reference(model_type: str, size: tuple[int, int], mode: str) -> None:
    image = picture(size, mode)
    processor = load(config(model_type), CONFIGS[model_type])
    expected = reference_for(model_type)(image, return_tensors="pt")
    [patches] = process(processor, image)
    assert byte_difference(patches.pixels, expected["pixel_values"], 0.27) < 0.01
    assert patches.layout == tuple(expected["image_grid_thw"][0].tolist())


@pytest.mark.parametrize("model_type", CONFIGS)
@pytest.mark.parametrize("size", SIZES)
def test_one_token_for_each_merged_patch(model_type: str, size: tuple[int, int]) -> None:
    processor = load(config(model_type), CONFIGS[model_type])
    planned = processor.plan(*size, NO_LIMITS)
    [item] = planned.items
    width, height = size
    assert item.num_tokens == reference_for(model_type).get_number_of_image_patches(height, width) // 4
    assert item.grid == (item.layout[1] // 2, item.layout[2] // 2)
    assert processor.placeholder_ids(planned) == [IMAGE_TOKEN] * item.num_tokens


@given(width=st.integers(1, 4000), height=st.integers(1, 4000))
def test_sizes_equal_the_reference(width: int, height: int) -> None:
    processor = load(config("qwen2_5_vl"), QWEN2_5)
    if max(width, height) > 200 * min(width, height):
        with pytest.raises(RequestError, match="200 times"):
            processor.plan(width, height, NO_LIMITS)
        return
    expected = smart_resize(height, width, 28, 3136, 12845056)
    [item] = processor.plan(width, height, NO_LIMITS).items
    assert (item.layout[1] * 14, item.layout[2] * 14) == expected


@settings(max_examples=300)
@given(
    width=st.integers(1, 4000),
    height=st.integers(1, 4000),
    max_pixels=st.integers(28 * 28, 2_000_000),
    min_pixels=st.integers(1, 2_000_000),
)
def test_no_picture_takes_more_than_the_limit(width: int, height: int, max_pixels: int, min_pixels: int) -> None:
    if max(width, height) > 200 * min(width, height):
        return
    limits = PixelLimits(min_pixels, max_pixels)
    [item] = load(config("qwen2_5_vl"), QWEN2_5).plan(width, height, limits).items
    assert item.num_tokens * 28 * 28 <= max_pixels
    assert item.num_tokens >= 1


def test_limits_scale_up_and_down() -> None:
    processor = load(config("qwen2_5_vl"), QWEN2_5)
    image = picture((640, 480))
    small = plan(processor, image, PixelLimits(max_pixels=100_000))
    large = plan(processor, image, PixelLimits(min_pixels=1_000_000))
    assert small.num_tokens * 784 <= 100_000
    assert small.num_tokens * 784 > 80_000
    assert large.num_tokens * 784 >= 1_000_000
    [patches] = process(processor, image, PixelLimits(max_pixels=100_000))
    assert patches.pixels.shape == (small.num_tokens * 4, 3 * 2 * 14 * 14)
    assert small.digest != plan(processor, image).digest


def test_an_aspect_ratio_over_200_is_refused() -> None:
    processor = load(config("qwen2_5_vl"), QWEN2_5)
    with pytest.raises(RequestError, match="at most 200 times") as refused:
        processor.plan(3000, 14, NO_LIMITS)
    assert refused.value.code == "invalid_request"
    assert processor.plan(3000, 15, NO_LIMITS).num_tokens > 0


def test_an_empty_picture_is_refused() -> None:
    with pytest.raises(RequestError, match="not empty"):
        load(config("qwen2_5_vl"), QWEN2_5).plan(0, 10, NO_LIMITS)


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(RequestError, match="max_pixels must be at least 1"):
        PixelLimits(max_pixels=0)


def test_old_and_new_names_of_the_budgets() -> None:
    nested = {**QWEN2_5, "min_pixels": None, "max_pixels": None, "size": {"min_pixels": 3136, "max_pixels": 12845056}}
    assert load(config("qwen2_5_vl"), nested) == load(config("qwen2_5_vl"), QWEN2_5)


def test_the_digest_covers_what_decides_pixels() -> None:
    processor = load(config("qwen2_5_vl"), QWEN2_5)
    changes: tuple[dict[str, object], ...] = (
        {"max_pixels": 100_000},
        {"resample": 1},
        {"image_mean": [0.5, 0.5, 0.5]},
        {"image_std": [0.5, 0.5, 0.5]},
        {"patch_size": 16},
    )
    others = [load(config("qwen2_5_vl"), QWEN2_5 | change) for change in changes]
    digests = {settings_digest(each) for each in (processor, *others)}
    assert len(digests) == len(changes) + 1
    assert settings_digest(load(config("qwen2_5_vl"), QWEN2_5)) == settings_digest(processor)


def test_a_processor_travels_to_another_process() -> None:
    processor = load(config("qwen3_vl"), QWEN3)
    copy = pickle.loads(pickle.dumps(processor))
    assert copy == processor
    assert settings_digest(copy) == settings_digest(processor)


@pytest.mark.gpu
def test_a_gpu_gives_the_same_patches() -> None:
    processor = load(config("qwen2_5_vl"), QWEN2_5)
    image = torch.randint(0, 256, (1754, 1240, 3), dtype=torch.uint8)
    planned = processor.plan(1240, 1754, NO_LIMITS)
    [on_cpu], [on_gpu] = processor.process(image, planned), processor.process(image.cuda(), planned)
    torch.testing.assert_close(on_gpu.pixels.cpu(), on_cpu.pixels)
