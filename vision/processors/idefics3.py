"""Idefics3 and SmolVLM: a grid of tiles with row and column tokens between them, and an overview at the end."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from mmserve.vision.anyres import Resolution
from mmserve.vision.image_plan import ImagePlan, ItemPlan, check_shape
from mmserve.vision.image_source import PixelLimits
from mmserve.vision.patches import PixelPatches
from mmserve.vision.processors.settings import (
    HALF,
    Normalisation,
    Settings,
    image_token_id,
    read_filter,
    read_normalisation,
    read_square,
)
from mmserve.vision.resize import Filter, cut_tiles, resize
from mmserve.weights.tokenizer import Tokenizer

_LONGEST_EDGE = 4096
_FAKE_TOKEN = "<fake_token_around_image>"
_OVERVIEW_TAG = "<global-img>"


@dataclass(frozen=True)
class Markup:
    """Token ids of the text between tiles."""

    fake: tuple[int, ...]
    overview: tuple[int, ...]
    newline: tuple[int, ...]
    two_newlines: tuple[int, ...]
    tiles: Mapping[tuple[int, int], tuple[int, ...]]

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer, max_tiles_a_side: int) -> "Markup":
        positions = range(1, max_tiles_a_side + 1)
        return cls(
            tuple(tokenizer.encode(_FAKE_TOKEN)),
            tuple(tokenizer.encode(_OVERVIEW_TAG)),
            tuple(tokenizer.encode("\n")),
            tuple(tokenizer.encode("\n\n")),
            {
                (row, column): tuple(tokenizer.encode(f"<row_{row}_col_{column}>"))
                for row in positions
                for column in positions
            },
        )


@dataclass(frozen=True)
class Idefics3Processor:
    """One item a tile: `[1, 3, side, side]`, layout (rows, columns) of pixels that are no padding, which is all of it.

    A picture is scaled to `longest_edge`, then to whole tiles. Limits scale it to fewer, down to one that is the
    overview itself.
    """

    image_token_id: int
    side: int
    longest_edge: int
    splits: bool
    tokens_a_tile: int
    resample: Filter
    normalise: Normalisation
    markup: Markup

    @classmethod
    def from_settings(cls, settings: Settings, config: Settings, tokenizer: Tokenizer) -> "Idefics3Processor":
        side = read_square(settings, "max_image_size", 364)
        longest_edge = min(read_square(settings, "size", 4 * 364), _LONGEST_EDGE)
        patches = side // int(config.get("vision_config", {}).get("patch_size", 32))
        return cls(
            image_token_id(config, 128257),
            side,
            longest_edge,
            bool(settings.get("do_image_splitting", True)),
            patches**2 // int(config.get("scale_factor", 2)) ** 2,
            read_filter(settings, "lanczos"),
            read_normalisation(settings, HALF, HALF),
            Markup.from_tokenizer(tokenizer, math.ceil((longest_edge + 1) / side)),
        )

    def plan(self, width: int, height: int, limits: PixelLimits) -> ImagePlan:
        """`choices` are the longest edge that the picture is scaled to first, and rows and columns of tiles."""
        check_shape(width, height)
        edge, rows, columns = next(
            (edge, rows, columns)
            for edge, rows, columns in self._grids(width, height)
            if rows == 0 or limits.allows_tiles(rows * columns + 1, self.side)
        )
        item = ItemPlan(self.tokens_a_tile, None, (self.side, self.side))
        return ImagePlan(width, height, (item,) * (rows * columns + 1), (edge, rows, columns))

    def _grids(self, width: int, height: int) -> Iterator[tuple[int, int, int]]:
        """From the checkpoint's own longest edge down to one tile: edge, rows and columns."""
        if not self.splits:
            yield self.longest_edge, 0, 0
            return
        smaller = range((self.longest_edge - 1) // self.side, 0, -1)
        for edge in (self.longest_edge, *(tiles * self.side for tiles in smaller)):
            tiled = whole_tiles(*scaled_to_edge(height, width, edge), self.side)
            rows, columns = tiled[0] // self.side, tiled[1] // self.side
            yield (edge, rows, columns) if rows * columns > 1 else (edge, 0, 0)

    def placeholder_ids(self, plan: ImagePlan) -> list[int]:
        _, rows, columns = plan.choices
        markup, tile = self.markup, [self.image_token_id] * self.tokens_a_tile
        ids: list[int] = []
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                ids += [*markup.fake, *markup.tiles[row, column], *tile]
            # The break after the last row and the one before the overview are one text, and may be one token.
            ids += markup.two_newlines if row == rows else markup.newline
        return [*ids, *markup.fake, *markup.overview, *tile, *markup.fake]

    def process(self, image: torch.Tensor, plan: ImagePlan) -> list[PixelPatches]:
        assert image.shape == (plan.height, plan.width, 3)
        edge, rows, _ = plan.choices
        scaled = resize(image, scaled_to_edge(plan.height, plan.width, edge), self.resample)
        if self.splits:
            scaled = resize(scaled, whole_tiles(scaled.shape[0], scaled.shape[1], self.side), self.resample)
        tiles = cut_tiles(scaled, self.side) if rows else ()
        overview = resize(scaled, (self.side, self.side), self.resample)
        return [PixelPatches(self.normalise(tile)[None], plan.items[0].layout) for tile in (*tiles, overview)]


def scaled_to_edge(height: int, width: int, edge: int) -> Resolution:
    """The longer side becomes `edge`, the shorter one even."""
    aspect_ratio = width / height
    if width >= height:
        return max(_even(int(edge / aspect_ratio)), 1), edge
    return edge, max(_even(int(edge * aspect_ratio)), 1)


def _even(length: int) -> int:
    return length + length % 2


def whole_tiles(height: int, width: int, side: int) -> Resolution:
    """The longer side grows to whole tiles, the shorter one with it and then to whole tiles as well."""
    aspect_ratio = width / height
    if width >= height:
        width = math.ceil(width / side) * side
        return math.ceil(int(width / aspect_ratio) / side) * side, width
    height = math.ceil(height / side) * side
    return height, math.ceil(int(height * aspect_ratio) / side) * side
