"""Pictures of awkward sizes, and processors built as a checkpoint describes them."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from tokenizers import AddedToken

from mmserve.vision.image_plan import ImagePlan, ImageProcessor
from mmserve.vision.image_source import PixelLimits
from mmserve.vision.patches import PixelPatches
from mmserve.vision.preprocess import load_processor
from mmserve.weights.dummy import DummyCheckpoint, byte_level_tokenizer
from mmserve.weights.tokenizer import Tokenizer

# Width and height: smaller than a patch, odd, usual, a page, thin, one pixel.
SIZES = ((26, 28), (161, 184), (640, 480), (1240, 1754), (3000, 200), (1, 1))
SAMPLES = tuple((size, mode) for size in SIZES for mode in ("RGB", "L"))
MARKUP = (
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)
NO_LIMITS = PixelLimits()


def picture(size: tuple[int, int], mode: str = "RGB") -> Image.Image:
    """Noise, where resampling is hard, with black print and white paper, where its overshoot is cut off."""
    width, height = size
    noise = np.random.default_rng(width * height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    draw = ImageDraw.Draw(image)
    draw.rectangle((width // 4, 0, width // 2, height), fill="white")
    draw.rectangle((width // 3, height // 5, width // 2, height // 4), fill="black")
    return image.convert(mode)


def pixels(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image.convert("RGB")))


def process(processor: ImageProcessor, image: Image.Image, limits: PixelLimits = NO_LIMITS) -> list[PixelPatches]:
    return processor.process(pixels(image), processor.plan(*image.size, limits))


def plan(processor: ImageProcessor, image: Image.Image, limits: PixelLimits = NO_LIMITS) -> ImagePlan:
    return processor.plan(*image.size, limits)


def markup_tokenizer() -> Tokenizer:
    """A token a byte, and Idefics3's special tokens."""
    backend = byte_level_tokenizer()._backend
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in MARKUP])
    return Tokenizer(backend)


def load(config: Mapping[str, Any], settings: Mapping[str, Any]) -> ImageProcessor:
    checkpoint = DummyCheckpoint(dict(config), {}, markup_tokenizer, dict(settings))
    processor = load_processor(checkpoint, checkpoint.tokenizer())
    assert processor is not None
    return processor


def byte_difference(ours: torch.Tensor, reference: torch.Tensor, std: float) -> float:
    """The largest difference before normalisation, in steps of 1/255."""
    assert ours.shape == reference.shape
    assert ours.dtype == torch.float32
    return float((ours - reference).abs().max()) * std * 255


def runs(ids: list[int], token: int) -> Iterator[int]:
    """Lengths of the runs of `token`."""
    length = 0
    for other in [*ids, -1]:
        if other == token:
            length += 1
        elif length:
            yield length
            length = 0
