"""An image as an encoder takes it, and its way between processes: shared memory, never pickled pixels."""

import contextlib
import math
import os
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory

import torch

from mmserve.errors import MMServeError
from mmserve.request import PatchesRef

_SHARED_MEMORY = "/dev/shm"


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


def share_all(items: list[PixelPatches]) -> tuple[PatchesRef, ...]:
    """All of them or none. Raises `MMServeError` (`insufficient_memory`) where there is no room."""
    require_room(sum(item.pixels.nbytes for item in items))
    refs: list[PatchesRef] = []
    try:
        for item in items:
            refs.append(share(item))
    except BaseException:
        for ref in refs:
            unlink(ref)
        raise
    return tuple(refs)


def require_room(num_bytes: int) -> None:
    """Shared memory is only found to be full when it is written, and then the process is killed."""
    with contextlib.suppress(FileNotFoundError):
        space = os.statvfs(_SHARED_MEMORY)
        if space.f_bavail * space.f_frsize < num_bytes:
            raise MMServeError(
                "insufficient_memory",
                f"{_SHARED_MEMORY} has no room for the picture's {num_bytes:,} bytes: lower max_pixels, or give it more"
                " memory (in a container, --shm-size)",
            )


def load(ref: PatchesRef, device: torch.device | str = "cpu") -> PixelPatches:
    """A copy of the pixels on `device`; one to a GPU takes its turn in the current stream."""
    segment = SharedMemory(name=ref.segment)
    try:
        pixels = _copy(segment, ref, torch.device(device))
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


def _copy(segment: SharedMemory, ref: PatchesRef, device: torch.device) -> torch.Tensor:
    pixels = _view(segment, ref.shape, getattr(torch, ref.dtype))
    if device.type != "cuda":
        return pixels.to(device, copy=True)
    # torch keeps pinned memory, and gives it out again once the copy from it is done.
    staging = torch.empty(pixels.shape, dtype=pixels.dtype, pin_memory=True)
    return staging.copy_(pixels).to(device, non_blocking=True)


def _view(segment: SharedMemory, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(segment.buf, dtype=dtype, count=math.prod(shape)).view(shape)
