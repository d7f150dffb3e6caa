"""What is known of a picture from its size alone: which pieces the encoder gets, and how many tokens each becomes."""

import hashlib
from dataclasses import dataclass
from typing import Protocol

import torch

from mmserve.errors import RequestError
from mmserve.vision.image_source import PixelLimits
from mmserve.vision.patches import PixelPatches

MAX_ASPECT_RATIO = 200
# Part of every digest: raise it when the pixels of some processor change.
PIXELS_VERSION = 1


@dataclass(frozen=True)
class ItemPlan:
    """One piece of a picture for the encoder; `grid` is (rows, columns) of its tokens where positions have axes."""

    num_tokens: int
    grid: tuple[int, int] | None = None
    layout: tuple[int, ...] = ()


@dataclass(frozen=True)
class ImagePlan:
    """How a picture of `width` x `height` is cut and scaled. `choices` are what the family decided on, for itself."""

    width: int
    height: int
    items: tuple[ItemPlan, ...]
    choices: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of the items; text between them comes on top."""
        return sum(item.num_tokens for item in self.items)

    @property
    def digest(self) -> bytes:
        """What of the picture's identity depends on its size and on the limits of a request."""
        return hashlib.blake2b(repr(self).encode(), digest_size=16).digest()


class ImageProcessor(Protocol):
    """A family's way from a picture to the encoder's input: a frozen dataclass, cheap to send to another process."""

    @property
    def image_token_id(self) -> int:
        """The token that the chat template writes once for a picture."""

    def plan(self, width: int, height: int, limits: PixelLimits) -> ImagePlan:
        """Raises `RequestError` for a picture over 200 times as long as wide."""

    def placeholder_ids(self, plan: ImagePlan) -> list[int]:
        """What replaces the one image token; its runs of image tokens belong to `plan.items`, in order."""

    def process(self, image: torch.Tensor, plan: ImagePlan) -> list[PixelPatches]:
        """uint8 `[height, width, 3]` on any device -> normalised float32, one a planned item."""


def plan_image(processor: ImageProcessor, width: int, height: int, limits: PixelLimits) -> ImagePlan:
    """`processor.plan`, with regard to limits that are a ceiling."""
    if not limits.is_ceiling:
        return processor.plan(width, height, limits)
    own = processor.plan(width, height, PixelLimits(limits.min_pixels))
    if own.num_tokens <= limits.spared_tokens:
        return own
    return min(own, processor.plan(width, height, limits), key=lambda plan: plan.num_tokens)


def check_shape(width: int, height: int) -> None:
    """`RequestError` for an empty picture, or one whose aspect ratio no encoder can use."""
    if min(width, height) < 1:
        raise RequestError("invalid_request", f"the image is {width} x {height} pixels: send one that is not empty")
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise RequestError(
            "invalid_request",
            f"the image is {width} x {height} pixels, and one side may be at most {MAX_ASPECT_RATIO} times the other: "
            "crop it, or send it in parts",
        )


def settings_digest(processor: ImageProcessor, device_type: str = "cpu") -> bytes:
    """Of everything that decides pixels, save the plan: the processor's class and all its fields, where it runs."""
    return hashlib.blake2b(f"{PIXELS_VERSION} {device_type} {processor!r}".encode(), digest_size=16).digest()
