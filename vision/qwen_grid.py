"""What the Qwen-VL encoders need to know of a grid of patches: order, positions, windows. Computed once a shape.

Patches come in blocks of `merge` x `merge`, block after block along a row of blocks: those of a block become one token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from mmserve.kernels.transfer import to_device

# Pages of one document mostly share a shape; a page of 10,000 patches takes about 1 MB here.
_SHAPES_KEPT = 64


@dataclass(frozen=True)
class Grid:
    """One image's patches, in the order in which an encoder computes them.

    `positions` `[N, 2]` (row, column) of each patch. `order` `[N / merge^2]`: the i-th block computed is the
    `order[i]`-th that came. `window_lengths` in patches; one window where there are no windows.
    """

    positions: torch.Tensor
    order: torch.Tensor
    window_lengths: tuple[int, ...]


@lru_cache(maxsize=_SHAPES_KEPT)
def plan_grid(rows: int, columns: int, merge: int, window: int | None) -> Grid:
    """A grid of `rows` x `columns` patches; `window` is a window's side in blocks, None for no windows.

    Windows are ordered by their size, since equal ones are computed together; their order does not matter otherwise.
    """
    window_ids = _window_ids(rows // merge, columns // merge, window)
    num_blocks = np.bincount(window_ids)
    order = np.lexsort((window_ids, num_blocks[window_ids]))
    positions = _positions(rows, columns, merge).reshape(-1, merge * merge, 2)[order]
    lengths = np.sort(num_blocks) * merge * merge
    return Grid(
        torch.from_numpy(positions.reshape(-1, 2)),
        torch.from_numpy(order),
        tuple(int(length) for length in lengths),
    )


def _window_ids(rows: int, columns: int, window: int | None) -> npt.NDArray[np.int64]:
    """The window of each block, numbered without gaps along rows of windows."""
    if window is None:
        return np.zeros(rows * columns, dtype=np.int64)
    row, column = np.indices((rows, columns), dtype=np.int64).reshape(2, -1)
    return row // window * -(-columns // window) + column // window


def _positions(rows: int, columns: int, merge: int) -> npt.NDArray[np.int64]:
    grid = np.indices((rows, columns), dtype=np.int64)
    blocks = grid.reshape(2, rows // merge, merge, columns // merge, merge)
    return blocks.transpose(1, 3, 2, 4, 0).reshape(-1, 2)


@dataclass(frozen=True)
class PackedGrids:
    """The grids of a batch of images, one after the other."""

    positions: torch.Tensor
    order: torch.Tensor
    window_lengths: tuple[int, ...]
    image_lengths: tuple[int, ...]


def pack_grids(shapes: Sequence[tuple[int, int]], merge: int, window: int | None, device: torch.device) -> PackedGrids:
    """`shapes` are (rows, columns) in patches."""
    grids = [plan_grid(rows, columns, merge, window) for rows, columns in shapes]
    image_lengths = tuple(rows * columns for rows, columns in shapes)
    starts = np.cumsum((0, *image_lengths[:-1])) // (merge * merge)
    return PackedGrids(
        to_device(torch.cat([grid.positions for grid in grids]).numpy(), device),
        to_device(
            torch.cat([grid.order + int(start) for grid, start in zip(grids, starts, strict=True)]).numpy(), device
        ),
        tuple(length for grid in grids for length in grid.window_lengths),
        image_lengths,
    )


@lru_cache(maxsize=_SHAPES_KEPT)
def interpolation_taps(rows: int, columns: int, merge: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bilinear resampling of a learned `side` x `side` table to a grid, corners aligned, in the order of patches.

    Indices into the table `[4, N]` and their weights `[4, N]` (float32).
    """
    row, column = plan_grid(rows, columns, merge, None).positions.unbind(1)
    row_taps, row_weights = (x[:, row][:, None] for x in _axis_taps(rows, side))
    column_taps, column_weights = (x[:, column][None] for x in _axis_taps(columns, side))
    indices, weights = row_taps * side + column_taps, row_weights * column_weights
    return indices.flatten(0, 1), weights.flatten(0, 1)


def _axis_taps(size: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The two nearest entries `[2, size]` of a table of `side` entries for each of `size` places, and their weights."""
    place = torch.arange(size, dtype=torch.float32) * (side - 1) / max(size - 1, 1)
    first = place.floor()
    taps = torch.stack((first, first + 1)).long().clamp_(max=side - 1)
    return taps, torch.stack((1 - (place - first), place - first))
