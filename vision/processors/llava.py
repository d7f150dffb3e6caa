"""LLaVA-1.5: one square a picture, as its CLIP or SigLIP encoder was trained with."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mmserve.vision.image_plan import ImagePlan, ItemPlan, check_shape
from mmserve.vision.image_source import PixelLimits
from mmserve.vision.patches import PixelPatches
from mmserve.vision.processors.settings import (
    CLIP_336,
    CLIP_MEAN,
    CLIP_STD,
    HALF,
    Normalisation,
    Settings,
    image_token_id,
    read_encoder,
    read_filter,
    read_normalisation,
    read_square,
    unsupported,
)
from mmserve.vision.resize import Filter, Window, resize


@dataclass(frozen=True)
class LlavaProcessor:
    """One item a picture: `[1, 3, side, side]`.

    The shorter edge becomes `shortest_edge` and the middle is kept; or the picture is stretched to the square, if that
    is None; before either it may be padded to a square with `padding`.
    """

    image_token_id: int
    side: int
    shortest_edge: int | None
    padding: tuple[int, ...] | None
    num_tokens: int
    resample: Filter
    normalise: Normalisation

    @classmethod
    def from_settings(cls, settings: Settings, config: Settings) -> "LlavaProcessor":
        kind = str(settings.get("image_processor_type", ""))
        is_siglip = kind.startswith("Siglip")
        side, shortest_edge = _read_geometry(settings, stretches_by_default=is_siglip)
        normalise = read_normalisation(settings, HALF if is_siglip else CLIP_MEAN, HALF if is_siglip else CLIP_STD)
        pads = kind.startswith("Llava") and bool(settings.get("do_pad"))
        return cls(
            image_token_id(config, 32000),
            side,
            shortest_edge,
            tuple(int(mean * 255) for mean in normalise.mean) if pads else None,
            _num_features(config, side),
            read_filter(settings, "bicubic"),
            normalise,
        )

    def plan(self, width: int, height: int, limits: PixelLimits) -> ImagePlan:  # noqa: ARG002
        check_shape(width, height)
        return ImagePlan(width, height, (ItemPlan(self.num_tokens),))

    def placeholder_ids(self, plan: ImagePlan) -> list[int]:
        return [self.image_token_id] * plan.num_tokens

    def process(self, image: torch.Tensor, plan: ImagePlan) -> list[PixelPatches]:
        assert image.shape == (plan.height, plan.width, 3)
        if self.padding is not None:
            image = pad_to_square(image, self.padding)
        return [PixelPatches(self.normalise(self._square(image))[None])]

    def _square(self, image: torch.Tensor) -> torch.Tensor:
        if self.shortest_edge is None:
            return resize(image, (self.side, self.side), self.resample)
        height, width = image.shape[0], image.shape[1]
        longest = int(self.shortest_edge * max(height, width) / min(height, width))
        size = (longest, self.shortest_edge) if width <= height else (self.shortest_edge, longest)
        window = Window((size[0] - self.side) // 2, (size[1] - self.side) // 2, self.side, self.side)
        return resize(image, size, self.resample, window=window)


def pad_to_square(image: torch.Tensor, color: tuple[int, ...]) -> torch.Tensor:
    """uint8 `[H, W, 3]` in the middle of a square of `color`."""
    height, width = image.shape[0], image.shape[1]
    side = max(height, width)
    square = image.new_empty(side, side, 3)
    for channel, value in enumerate(color):
        square[..., channel] = value
    top, left = (side - height) // 2, (side - width) // 2
    square[top : top + height, left : left + width] = image
    return square


def _read_geometry(settings: Settings, *, stretches_by_default: bool) -> tuple[int, int | None]:
    """The side of the square, and the shortest edge before the middle is cut out, if it is."""
    size = read_square(settings, "size", 224)
    named = settings.get("size")
    stretches = named.get("shortest_edge") is None if isinstance(named, Mapping) else stretches_by_default
    side = read_square(settings, "crop_size", 224) if settings.get("do_center_crop", not stretches_by_default) else size
    if side > size or (stretches and side != size):
        raise unsupported(f"a center crop of {side} from {size} pixels")
    return side, None if stretches else size


def _num_features(config: Settings, side: int) -> int:
    """A class token comes first in CLIP's features, and the strategy `default` drops whatever comes first."""
    encoder = read_encoder(config, CLIP_336)
    drops_first = bool(config.get("vision_feature_select_strategy", "default") == "default")
    patches_a_side = encoder.patches_a_side(side)
    return patches_a_side * patches_a_side + encoder.has_class_token - drops_first
