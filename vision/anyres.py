"""The geometry of LLaVA's any-resolution tiles: which grid a picture gets, and what of it is not padding."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

Resolution = tuple[int, int]


@dataclass(frozen=True)
class TileGrid:
    """Rows and columns of tiles; (0, 0) where the overview is all there is."""

    rows: int
    columns: int

    @property
    def num_tiles(self) -> int:
        """With the overview."""
        return self.rows * self.columns + 1


def choose_grid(
    height: int, width: int, resolutions: Sequence[Resolution], tile_size: int, max_tiles: int | None = None
) -> TileGrid:
    """The grid that keeps most of the picture's pixels and pads least, among those of at most `max_tiles` in all."""
    grids = [TileGrid(rows // tile_size, columns // tile_size) for rows, columns in resolutions]
    allowed = [grid for grid in grids if max_tiles is None or grid.num_tiles <= max_tiles]
    best, best_kept, best_wasted = TileGrid(0, 0), 0, math.inf
    for grid in allowed:
        kept = _kept_pixels(height, width, grid.rows * tile_size, grid.columns * tile_size)
        wasted = grid.rows * grid.columns * tile_size**2 - kept
        if kept > best_kept or (kept == best_kept and wasted < best_wasted):
            best, best_kept, best_wasted = grid, kept, wasted
    return best


def grid_of_tiles(
    height: int, width: int, resolutions: Sequence[Resolution], tile_size: int, num_tiles: int
) -> TileGrid:
    """The grid that a picture was cut by, from how many tiles it has: the best of those that have as many."""
    same = [
        (rows, columns) for rows, columns in resolutions if rows * columns == (num_tiles - 1) * tile_size * tile_size
    ]
    return choose_grid(height, width, same, tile_size)


def _kept_pixels(height: int, width: int, into_height: int, into_width: int) -> int:
    scale = min(into_width / width, into_height / height)
    return min(int(width * scale) * int(height * scale), width * height)


def fitted_size(height: int, width: int, into: Resolution) -> Resolution:
    """The picture's size once it fills `into` as far as its shape allows."""
    scale_height, scale_width = into[0] / height, into[1] / width
    if scale_width < scale_height:
        return min(math.ceil(height * scale_width), into[0]), into[1]
    return into[0], min(math.ceil(width * scale_height), into[1])


def unpadded_size(rows: int, columns: int, height: int, width: int) -> Resolution:
    """Rows and columns of features that are left of `rows` x `columns` when the padding around a picture is cut off."""
    if width / height > columns / rows:
        kept = int(round(height * (columns / width), 7))
        return rows - (rows - kept) // 2 * 2, columns
    kept = int(round(width * (rows / height), 7))
    return rows, columns - (columns - kept) // 2 * 2


def pooled_size(rows: int, columns: int, side: int, max_tiles: int) -> Resolution:
    """LLaVA-OneVision scales features down to about `max_tiles` times `side` x `side` where there are many more."""
    ratio = math.sqrt(rows * columns / (max_tiles * side**2))
    return (int(rows // ratio), int(columns // ratio)) if ratio > 1.1 else (rows, columns)
