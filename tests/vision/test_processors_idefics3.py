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
    runs,
)
from transformers import PreTrainedTokenizerFast
from transformers.models.idefics3.image_processing_pil_idefics3 import (
    Idefics3ImageProcessorPil,
    _resize_output_size_rescale_to_max_len,
)
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor as ReferenceIdefics3
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from mmserve.errors import RequestError
from mmserve.vision.image_plan import ImagePlan, ImageProcessor, settings_digest
from mmserve.vision.image_source import PixelLimits
from mmserve.vision.preprocess import load_processor
from mmserve.vision.processors.idefics3 import scaled_to_edge
from mmserve.weights.dummy import DummyCheckpoint
from mmserve.weights.tokenizer import Tokenizer

TOKENIZER = markup_tokenizer()
IMAGE_TOKEN = TOKENIZER.encode("<image>")[0]
# As published for Idefics3-8B and for SmolVLM-256M.
IDEFICS3: dict[str, Any] = {
    "image_processor_type": "Idefics3ImageProcessor",
    "size": {"longest_edge": 1456},
    "max_image_size": {"longest_edge": 364},
}
SMOLVLM: dict[str, Any] = {
    "image_processor_type": "SmolVLMImageProcessor",
    "size": {"longest_edge": 2048},
    "max_image_size": {"longest_edge": 512},
}
FAMILIES = {
    "idefics3": (IDEFICS3, Idefics3ImageProcessorPil, 14, 2, 169),
    "smolvlm": (SMOLVLM, SmolVLMImageProcessorPil, 16, 4, 64),
}


def config(model_type: str) -> dict[str, Any]:
    _, _, patch_size, scale_factor, _ = FAMILIES[model_type]
    return {
        "model_type": model_type,
        "image_token_id": IMAGE_TOKEN,
        "scale_factor": scale_factor,
        "vision_config": {"patch_size": patch_size},
    }


def make(model_type: str, **changes: Any) -> ImageProcessor:
    return load(config(model_type), FAMILIES[model_type][0] | changes)


def written(model_type: str, planned: ImagePlan) -> str:
    """What the reference writes for a picture."""
    _, rows, columns = planned.choices
    text: str = get_image_prompt_string(
        rows,
        columns,
        FAMILIES[model_type][-1],
        fake_token_around_image="<fake_token_around_image>",
        image_token="<image>",
        global_image_token="<global-img>",
    )
    return text


def reference_pixels(model_type: str, image: Any, **changes: Any) -> Any:
    settings_, reference, *_ = FAMILIES[model_type]
    options = {key: value for key, value in (settings_ | changes).items() if key != "image_processor_type"}
    return reference(**options)(image, return_tensors="pt", return_row_col_info=True)


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize(("size", "mode"), SAMPLES)
def test_tiles_equal_the_reference(model_type: str, size: tuple[int, int], mode: str) -> None:
    image = picture(size, mode)
    expected = reference_pixels(model_type, image)
    items = process(make(model_type), image)
    tiles = torch.cat([item.pixels for item in items])
    assert byte_difference(tiles, expected["pixel_values"][0], 0.5) < 0.01
    assert plan(make(model_type), image).choices[1:] == (expected["rows"][0][0], expected["cols"][0][0])
    # The layout is the part that is no padding: the reference's mask says that there is none.
    assert bool(expected["pixel_attention_mask"].all())
    assert {item.layout for item in items} == {tuple(tiles.shape[-2:])}


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("size", SIZES)
def test_placeholders_equal_what_the_reference_writes(model_type: str, size: tuple[int, int]) -> None:
    processor = make(model_type)
    planned = processor.plan(*size, NO_LIMITS)
    assert processor.placeholder_ids(planned) == TOKENIZER.encode(written(model_type, planned))


@pytest.mark.parametrize("size", SIZES)
def test_placeholders_equal_the_reference_processor(size: tuple[int, int]) -> None:
    backend = markup_tokenizer()._backend
    reference = ReferenceIdefics3(
        Idefics3ImageProcessorPil(), PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=MARKUP[3])
    )
    ids = reference(images=[picture(size)], text=["x<image>y"], return_tensors="pt")["input_ids"][0].tolist()
    processor = make("idefics3")
    assert processor.placeholder_ids(plan(processor, picture(size))) == ids[1:-1]


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("size", SIZES)
def test_runs_of_image_tokens_are_the_items(model_type: str, size: tuple[int, int]) -> None:
    processor = make(model_type)
    planned = processor.plan(*size, NO_LIMITS)
    lengths = list(runs(processor.placeholder_ids(planned), IMAGE_TOKEN))
    assert lengths == [item.num_tokens for item in planned.items]


def test_one_token_for_two_newlines_where_the_vocabulary_has_it() -> None:
    """As in Llama 3's: the break after the last row and the one before the overview are one text."""
    backend = markup_tokenizer()._backend
    backend.add_tokens(["\n\n"])
    tokenizer = Tokenizer(backend)
    two_newlines = tokenizer.encode("\n\n")
    checkpoint = DummyCheckpoint(config("smolvlm"), {}, lambda: tokenizer, SMOLVLM)
    processor = load_processor(checkpoint, tokenizer)
    assert processor is not None
    planned = processor.plan(1240, 1754, NO_LIMITS)
    ids = processor.placeholder_ids(planned)
    assert len(two_newlines) == 1
    assert ids == tokenizer.encode(written("smolvlm", planned))
    assert list(runs(ids, two_newlines[0])) == [1]


@given(width=st.integers(1, 5000), height=st.integers(1, 5000), edge=st.sampled_from([364, 1456, 2048]))
def test_first_scaling_equals_the_reference(width: int, height: int, edge: int) -> None:
    assert scaled_to_edge(height, width, edge) == _resize_output_size_rescale_to_max_len(height, width, max_len=edge)


@settings(max_examples=200)
@given(width=st.integers(1, 4000), height=st.integers(1, 4000), max_pixels=st.integers(1, 20 * 512 * 512))
def test_no_picture_takes_more_tiles_than_the_limit(width: int, height: int, max_pixels: int) -> None:
    if max(width, height) > 200 * min(width, height):
        return
    planned = SMOLVLM_PROCESSOR.plan(width, height, PixelLimits(max_pixels=max_pixels))
    assert len(planned.items) == 1 or len(planned.items) * 512 * 512 <= max_pixels
    assert planned.num_tokens == 64 * len(planned.items)


SMOLVLM_PROCESSOR = make("smolvlm")


@pytest.mark.parametrize(("max_tiles", "edge"), [(13, 2048), (12, 1536), (10, 1536), (9, 1024), (5, 1024), (4, 512)])
def test_a_limit_is_a_smaller_longest_edge_of_the_reference(max_tiles: int, edge: int) -> None:
    image, limits = picture((1240, 1754)), PixelLimits(max_pixels=max_tiles * 512 * 512)
    expected = reference_pixels("smolvlm", image, size={"longest_edge": edge})["pixel_values"][0]
    tiles = torch.cat([item.pixels for item in process(SMOLVLM_PROCESSOR, image, limits)])
    assert byte_difference(tiles, expected, 0.5) < 0.01


def test_without_splitting_there_is_one_tile() -> None:
    processor, image = make("smolvlm", do_image_splitting=False), picture((640, 480))
    expected = reference_pixels("smolvlm", image, do_image_splitting=False)["pixel_values"][0]
    [item] = process(processor, image)
    assert byte_difference(item.pixels, expected, 0.5) < 0.01
    assert list(runs(processor.placeholder_ids(plan(processor, image)), IMAGE_TOKEN)) == [64]


def test_a_strip_is_refused() -> None:
    with pytest.raises(RequestError, match="at most 200 times"):
        SMOLVLM_PROCESSOR.plan(201, 1, NO_LIMITS)


def test_the_digest_covers_the_tile_and_the_longest_edge() -> None:
    processors = [
        SMOLVLM_PROCESSOR,
        make("smolvlm", size={"longest_edge": 1024}),
        make("smolvlm", max_image_size={"longest_edge": 384}),
        make("smolvlm", resample=3),
    ]
    assert len({settings_digest(processor) for processor in processors}) == len(processors)
