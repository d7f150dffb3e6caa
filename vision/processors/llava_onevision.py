"""LLaVA-OneVision: tiles as in LLaVA-NeXT, more of them, and features pooled where they become too many."""

from dataclasses import dataclass

import torch

from mmserve.vision.anyres import Resolution, TileGrid, pooled_size
from mmserve.vision.processors.llava import pad_to_square
from mmserve.vision.processors.llava_next import LlavaNextProcessor, shared_resolutions
from mmserve.vision.processors.settings import (
    CLIP_MEAN,
    CLIP_STD,
    SIGLIP_384,
    Settings,
    image_token_id,
    read_encoder,
    read_filter,
    read_normalisation,
    read_square,
    unsupported,
)
from mmserve.vision.resize import resize

_SIDE = 384
RESOLUTIONS = tuple((rows * _SIDE, columns * _SIDE) for rows in range(1, 7) for columns in range(1, 7))


@dataclass(frozen=True)
class LlavaOnevisionProcessor(LlavaNextProcessor):
    """A lone overview is padded to a square, not stretched, as the family does with several pictures in one prompt."""

    max_tiles: int

    @classmethod
    def from_settings(cls, settings: Settings, config: Settings) -> "LlavaOnevisionProcessor":
        side = read_square(settings, "size", _SIDE)
        if settings.get("do_center_crop"):
            raise unsupported("do_center_crop: true")
        return cls(
            image_token_id(config, 151646),
            side,
            read_encoder(config, SIGLIP_384).patches_a_side(side),
            shared_resolutions(settings, config, RESOLUTIONS),
            read_filter(settings, "bicubic"),
            read_normalisation(settings, CLIP_MEAN, CLIP_STD),
            read_max_tiles(config),
        )

    def _feature_size(self, grid: TileGrid, height: int, width: int) -> Resolution:
        rows, columns = super()._feature_size(grid, height, width)
        return pooled_size(rows, columns, self.patches_a_side, self.max_tiles)

    def _lone_overview(self, image: torch.Tensor) -> torch.Tensor:
        color = tuple(int(mean * 255) for mean in self.normalise.mean)
        return resize(pad_to_square(image, color), (self.side, self.side), self.resample)


def read_max_tiles(config: Settings) -> int:
    """The N of `anyres_max_N`: features are scaled down to about so many tiles."""
    aspect_ratio = str(config.get("vision_aspect_ratio", "anyres_max_9"))
    prefix, number = aspect_ratio[: len("anyres_max_")], aspect_ratio[len("anyres_max_") :]
    if prefix != "anyres_max_" or not number.isdigit():
        raise unsupported(f"vision_aspect_ratio: {aspect_ratio}")
    return int(number)
