"""Pillow's resampling on torch, bit for bit: two passes, antialiased when shrinking, rounded to bytes in between.

Weights are Pillow's integers, so sums have no rounding error: on a CPU products with narrow blocks of the weight matrix
in float64, elsewhere sums over taps in int32. `torch.nn.functional.interpolate` on bytes is much faster but does
not agree: it rounds weights to 16 bits and knows one order of passes, so that it differs by 2 on pages and by 20 where
one side grows and the other shrinks. Float32 would be twice as fast, and where a byte is a tie it differs by 2, too.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

from mmserve.kernels import reference

Filter = Literal["bilinear", "bicubic", "lanczos"]
_SUPPORT: dict[Filter, float] = {"bilinear": 1.0, "bicubic": 2.0, "lanczos": 3.0}
# Pillow keeps weights as integers with this many bits after the point.
_PRECISION_BITS = 22
# A4 at 150 dpi to 1232 x 1764, one core of an EPYC with AVX-512: 31 ms so; 36 with blocks of 32, 42 with blocks of 8.
_BLOCK = 16
_ROWS_AT_ONCE = 128


@dataclass(frozen=True)
class Window:
    """The part of the resized picture that is wanted."""

    top: int
    left: int
    height: int
    width: int


def resize(
    image: torch.Tensor, size: tuple[int, int], resample: Filter, *, window: Window | None = None
) -> torch.Tensor:
    """uint8 `[H, W, C]` -> uint8 `[height, width, C]` of `size` (height, width), or of the `window` in it.

    The result lies in memory as rows of channels, so that channels-first views of it are cheap.
    """
    part = window or Window(0, 0, *size)
    rows = _Axis(image.shape[0], size[0], part.top, part.top + part.height, resample)
    columns = _Axis(image.shape[1], size[1], part.left, part.left + part.width, resample)
    shrunk_height, shrunk_width = image.shape[0] - size[0], image.shape[1] - size[1]
    # Bytes depend on the order. This is how Pillow chooses it since its version 13.
    if shrunk_height > max(0, 2 * shrunk_width):
        low, high = _reach(columns)
        return _resize_columns(_resize_rows(image[:, low:high], rows, 0), columns, low)
    low, high = _reach(rows)
    return _resize_rows(_resize_columns(image[low:high], columns, 0), rows, low)


def cut_tiles(image: torch.Tensor, side: int) -> Iterator[torch.Tensor]:
    """`[rows * side, columns * side, C]` -> `[side, side, C]` each, row by row."""
    for top in range(0, image.shape[0], side):
        for left in range(0, image.shape[1], side):
            yield image[top : top + side, left : left + side]


@dataclass(frozen=True)
class _Axis:
    """`length` pixels become `out_length`, of which those from `first` up to `stop` are wanted."""

    length: int
    out_length: int
    first: int
    stop: int
    resample: Filter

    @property
    def is_identity(self) -> bool:
        return self.length == self.out_length == self.stop - self.first


@dataclass(frozen=True)
class _Taps:
    """For each pixel wanted: where its inputs start, and their weights as integers `[pixels, inputs]`."""

    starts: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True)
class _Block:
    """The wanted pixels `start` up to `stop` come from inputs `low` up to `high`, by `weights` `[pixels, inputs]`."""

    start: int
    stop: int
    low: int
    high: int
    weights: torch.Tensor


@lru_cache(maxsize=32)
def _taps(axis: _Axis) -> _Taps:
    scale = axis.length / axis.out_length
    stretch = max(scale, 1.0)
    support = _SUPPORT[axis.resample] * stretch
    centers = (torch.arange(axis.first, axis.stop, dtype=torch.float64) + 0.5) * scale
    starts = (centers - support + 0.5).long().clamp_(min=0)
    ends = (centers + support + 0.5).long().clamp_(max=axis.length)
    inputs = starts[:, None] + torch.arange(int((ends - starts).max()))
    weights = _kernel((inputs - centers[:, None] + 0.5) / stretch, axis.resample)
    weights = weights.where(inputs < ends[:, None], torch.zeros((), dtype=torch.float64))
    weights /= weights.sum(1, keepdim=True)
    scaled = weights * (1 << _PRECISION_BITS)
    return _Taps(starts, (scaled + scaled.sign() * 0.5).to(torch.int32))


def _kernel(x: torch.Tensor, resample: Filter) -> torch.Tensor:
    distance = x.abs()
    if resample == "bilinear":
        return (1.0 - distance).clamp_(min=0.0)
    if resample == "bicubic":
        near = (1.5 * distance - 2.5) * distance * distance + 1.0
        far = ((-0.5 * distance + 2.5) * distance - 4.0) * distance + 2.0
        return near.where(distance < 1.0, far) * (distance < 2.0)
    return torch.sinc(x) * torch.sinc(x / 3.0) * (distance < 3.0)


def _reach(axis: _Axis) -> tuple[int, int]:
    """Inputs that the wanted pixels need: first, and one past the last."""
    if axis.is_identity:
        return 0, axis.length
    taps = _taps(axis)
    return int(taps.starts[0]), min(int(taps.starts[-1]) + taps.weights.shape[1], axis.length)


@lru_cache(maxsize=32)
def _blocks(axis: _Axis) -> tuple[_Block, ...]:
    return tuple(_cut_blocks(axis))


def _cut_blocks(axis: _Axis) -> Iterator[_Block]:
    taps = _taps(axis)
    num_pixels, num_taps = taps.weights.shape
    weights = taps.weights.double() / (1 << _PRECISION_BITS)
    for start in range(0, num_pixels, _BLOCK):
        stop = min(start + _BLOCK, num_pixels)
        low = int(taps.starts[start])
        offsets = taps.starts[start:stop, None] - low + torch.arange(num_taps)
        wide = torch.zeros(stop - start, int(offsets[-1, -1]) + 1, dtype=torch.float64)
        wide.scatter_(1, offsets, weights[start:stop])
        high = min(low + wide.shape[1], axis.length)
        yield _Block(start, stop, low, high, wide[:, : high - low].contiguous())


def _resize_columns(image: torch.Tensor, axis: _Axis, low: int) -> torch.Tensor:
    """`image` begins with column `low` of the whole."""
    if axis.is_identity:
        return image
    return (
        _columns_by_blocks(image, axis, low) if image.device.type == "cpu" else _by_taps(image, axis, low, dimension=1)
    )


def _resize_rows(image: torch.Tensor, axis: _Axis, low: int) -> torch.Tensor:
    """`image` begins with row `low` of the whole."""
    if axis.is_identity:
        return image
    on_cpu = image.device.type == "cpu"
    return _rows_by_blocks(image, axis, low) if on_cpu else _by_taps(image, axis, low, dimension=0)


def _columns_by_blocks(image: torch.Tensor, axis: _Axis, low: int) -> torch.Tensor:
    height, width, channels = image.shape
    blocks = [(block, block.weights.t().contiguous()) for block in _blocks(axis)]
    out_width = axis.stop - axis.first
    out = torch.empty(height, channels, out_width, dtype=torch.uint8)
    sums = torch.empty(min(_ROWS_AT_ONCE, height) * channels, out_width, dtype=torch.float64)
    for top in range(0, height, _ROWS_AT_ONCE):
        rows = image[top : top + _ROWS_AT_ONCE].permute(0, 2, 1).contiguous().double().view(-1, width)
        part = sums[: rows.shape[0]]
        for block, weights in blocks:
            torch.mm(rows[:, block.low - low : block.high - low], weights, out=part[:, block.start : block.stop])
        out[top : top + _ROWS_AT_ONCE] = _to_bytes(part).view(-1, channels, out_width)
    return out.permute(0, 2, 1)


def _rows_by_blocks(image: torch.Tensor, axis: _Axis, low: int) -> torch.Tensor:
    _, width, channels = image.shape
    rows = image.permute(0, 2, 1).reshape(-1, channels * width)
    out = torch.empty(axis.stop - axis.first, channels * width, dtype=torch.uint8)
    for block in _blocks(axis):
        inputs = rows[block.low - low : block.high - low].double()
        out[block.start : block.stop] = _to_bytes(torch.mm(block.weights, inputs))
    return out.view(-1, channels, width).permute(0, 2, 1)


def _to_bytes(values: torch.Tensor) -> torch.Tensor:
    """Rounded half up and clamped, in place; storing as bytes cuts the fraction off."""
    return values.add_(0.5).clamp_(0.0, 255.0)


def _by_taps(image: torch.Tensor, axis: _Axis, low: int, *, dimension: int) -> torch.Tensor:
    """`image` begins with pixel `low` of the whole along `dimension`."""
    height, width, channels = image.shape
    starts, weights = _taps_on(axis, low, image.device)
    shape = (1, height, width * channels) if dimension == 0 else image.shape
    resampled = _resample_on(image.device)(image.contiguous().view(shape), starts, weights, _PRECISION_BITS)
    return resampled.view((-1, width, channels) if dimension == 0 else (height, -1, channels))


@lru_cache(maxsize=64)
def _taps_on(axis: _Axis, low: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the inputs start, counted from `low`, `[pixels]`; their weights `[inputs, pixels]`; on the device."""
    taps = _taps(axis)
    return (taps.starts - low).int().to(device), taps.weights.t().contiguous().to(device)


def _resample_on(device: torch.device) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]:
    if device.type != "cuda":
        return reference.resample
    from mmserve.kernels.resample import resample

    return resample
