"""An image as an encoder takes it, and its way between processes: shared memory, never pickled pixels."""

import contextlib
import itertools
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import torch

from mmserve.errors import MMServeError
from mmserve.request import PatchesRef

_SHARED_MEMORY = "/dev/shm"
_numbers = itertools.count()


@dataclass(frozen=True)
class PixelPatches:
    """Preprocessed pixels in the shape of the family's encoder, and the layout that it needs beside them."""

    pixels: torch.Tensor
    layout: tuple[int, ...] = ()


def new_segment(size_bytes: int, mark: str = "") -> SharedMemory:
    """A segment whose name begins with `mark`, so that it is found even if its maker dies before it is told of."""
    name = f"{mark}-{os.getpid()}-{next(_numbers)}" if mark else None
    return SharedMemory(name, create=True, size=max(size_bytes, 1))


def unlink_marked(mark: str, *, but: Iterable[PatchesRef] = ()) -> None:
    """Give back all segments of this mark but those that are referred to, where the system lists them."""
    kept = {ref.segment for ref in but}
    for path in Path(_SHARED_MEMORY).glob(f"{mark}-*"):
        if path.name not in kept:
            _unlink(path.name)


def share(patches: PixelPatches, mark: str = "") -> PatchesRef:
    """Copy the pixels to a new segment. Whoever gets the reference has to `unlink` it."""
    pixels = patches.pixels.contiguous()
    segment = new_segment(pixels.nbytes, mark)
    _view(segment, tuple(pixels.shape), pixels.dtype).copy_(pixels)
    name = segment.name
    segment.close()
    return PatchesRef(name, tuple(pixels.shape), str(pixels.dtype).removeprefix("torch."), patches.layout)


def share_all(items: list[PixelPatches], mark: str = "") -> tuple[PatchesRef, ...]:
    """All of them or none. Raises `MMServeError` (`insufficient_memory`) where there is no room."""
    require_room(sum(item.pixels.nbytes for item in items))
    refs: list[PatchesRef] = []
    try:
        for item in items:
            refs.append(share(item, mark))
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
    _unlink(ref.segment)


def _unlink(name: str) -> None:
    # What clears /dev/shm at a user's logout may have been there before.
    with contextlib.suppress(FileNotFoundError):
        segment = SharedMemory(name=name)
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
