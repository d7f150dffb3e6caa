"""An image as an encoder takes it, and its way between processes: shared memory, never pickled pixels."""

import math
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory

import torch

from mmserve.request import PatchesRef


@dataclass(frozen=True)
class PixelPatches:
    """Preprocessed pixels in the shape of the family's encoder, and the layout that it needs beside them."""

    pixels: torch.Tensor
    layout: tuple[int, ...] = ()


def share(patches: PixelPatches) -> PatchesRef:
    """Copy the pixels to a new segment. Whoever gets the reference has to `unlink` it."""
    pixels = patches.pixels.contiguous()
    segment = SharedMemory(create=True, size=max(pixels.nbytes, 1))
    _view(segment, tuple(pixels.shape), pixels.dtype).copy_(pixels)
    name = segment.name
    segment.close()
    return PatchesRef(name, tuple(pixels.shape), str(pixels.dtype).removeprefix("torch."), patches.layout)


def load(ref: PatchesRef, device: torch.device | str = "cpu") -> PixelPatches:
    """A copy of the pixels on `device`."""
    segment = SharedMemory(name=ref.segment)
    try:
        pixels = _view(segment, ref.shape, getattr(torch, ref.dtype)).to(device, copy=True)
    finally:
        segment.close()
    return PixelPatches(pixels, ref.layout)


def unlink(ref: PatchesRef) -> None:
    """Give the segment back to the system."""
    segment = SharedMemory(name=ref.segment)
    segment.close()
    segment.unlink()


def num_bytes(ref: PatchesRef) -> int:
    dtype: torch.dtype = getattr(torch, ref.dtype)
    return math.prod(ref.shape) * dtype.itemsize


def _view(segment: SharedMemory, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(segment.buf, dtype=dtype, count=math.prod(shape)).view(shape)
