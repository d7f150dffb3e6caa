"""LLaVA-NeXT (1.6): an overview, and the picture at the best of some resolutions, cut into tiles."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from mmserve.vision.anyres import Resolution, TileGrid, choose_grid, fitted_size, unpadded_size
from mmserve.vision.image_plan import ImagePlan, ItemPlan, check_shape
from mmserve.vision.image_source import PixelLimits
from mmserve.vision.patches import PixelPatches
from mmserve.vision.processors.settings import (
    CLIP_336,
    CLIP_MEAN,
    CLIP_STD,
    Normalisation,
    Settings,
    image_token_id,
    read_encoder,
    read_filter,
    read_normalisation,
    read_square,
    unsupported,
)
from mmserve.vision.resize import Filter, cut_tiles, resize

RESOLUTIONS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))


@dataclass(frozen=True)
class LlavaNextProcessor:
    """One item a picture: `[tiles, 3, side, side]`, the overview first, layout (height, width) of the original.

    Limits leave out the larger grids, down to the overview alone, which is followed by one newline token.
    """

    image_token_id: int
    side: int
    patches_a_side: int
    resolutions: tuple[Resolution, ...]
    resample: Filter
    normalise: Normalisation

    @classmethod
    def from_settings(cls, settings: Settings, config: Settings) -> "LlavaNextProcessor":
        side = read_square(settings, "crop_size", read_square(settings, "size", 224))
        if read_square(settings, "size", 224) != side:
            raise unsupported(f"crop_size: {side} unlike size")
        return cls(
            image_token_id(config, 32000),
            side,
            read_encoder(config, CLIP_336).patches_a_side(side),
            shared_resolutions(settings, config, RESOLUTIONS),
            read_filter(settings, "bicubic"),
            read_normalisation(settings, CLIP_MEAN, CLIP_STD),
        )

    def plan(self, width: int, height: int, limits: PixelLimits) -> ImagePlan:
        check_shape(width, height)
        max_tiles = None if limits.max_pixels is None else limits.max_pixels // self.side**2
        grid = choose_grid(height, width, self.resolutions, self.side, max_tiles)
        item = ItemPlan(self.patches_a_side**2 + self._num_tile_tokens(grid, height, width), None, (height, width))
        return ImagePlan(width, height, (item,), (grid.rows, grid.columns))

    def _num_tile_tokens(self, grid: TileGrid, height: int, width: int) -> int:
        """Each row of features ends in a newline token."""
        rows, columns = self._feature_size(grid, height, width)
        return rows * (columns + 1)

    def _feature_size(self, grid: TileGrid, height: int, width: int) -> Resolution:
        if grid.num_tiles == 1:
            return 1, 0
        return unpadded_size(grid.rows * self.patches_a_side, grid.columns * self.patches_a_side, height, width)

    def placeholder_ids(self, plan: ImagePlan) -> list[int]:
        return [self.image_token_id] * plan.num_tokens

    def process(self, image: torch.Tensor, plan: ImagePlan) -> list[PixelPatches]:
        assert image.shape == (plan.height, plan.width, 3)
        grid = TileGrid(*plan.choices)
        pixels = torch.empty(grid.num_tiles, 3, self.side, self.side, device=image.device)
        pixels[0] = self.normalise(self._lone_overview(image) if grid.num_tiles == 1 else self._stretched(image))
        for index, tile in enumerate(self._tiles(image, grid), start=1):
            pixels[index] = self.normalise(tile)
        return [PixelPatches(pixels, plan.items[0].layout)]

    def _stretched(self, image: torch.Tensor) -> torch.Tensor:
        return resize(image, (self.side, self.side), self.resample)

    def _lone_overview(self, image: torch.Tensor) -> torch.Tensor:
        return self._stretched(image)

    def _tiles(self, image: torch.Tensor, grid: TileGrid) -> Iterator[torch.Tensor]:
        """Bytes, row by row; black around the picture."""
        if grid.num_tiles == 1:
            return
        canvas_size = (grid.rows * self.side, grid.columns * self.side)
        size = fitted_size(image.shape[0], image.shape[1], canvas_size)
        canvas = torch.zeros(*canvas_size, 3, dtype=torch.uint8, device=image.device)
        top, left = (canvas_size[0] - size[0]) // 2, (canvas_size[1] - size[1]) // 2
        canvas[top : top + size[0], left : left + size[1]] = resize(image, size, self.resample)
        yield from cut_tiles(canvas, self.side)


def read_resolutions(settings: Settings, default: Sequence[Resolution]) -> tuple[Resolution, ...]:
    """(height, width) pairs."""
    return tuple((int(height), int(width)) for height, width in settings.get("image_grid_pinpoints") or default)


def shared_resolutions(settings: Settings, config: Settings, default: Sequence[Resolution]) -> tuple[Resolution, ...]:
    """The processor's; `SetupError` where the model of `config.json` would put tiles together by others."""
    resolutions = read_resolutions(settings, default)
    if read_resolutions(config, default) != resolutions:
        raise unsupported("image_grid_pinpoints unlike config.json")
    return resolutions
