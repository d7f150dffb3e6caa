"""What runs in a preprocessing worker: a process that draws or decodes a picture and cuts it for the encoder."""

import contextlib
import os
import time
from dataclasses import dataclass

import torch

from mmserve.errors import DocumentError, MMServeError
from mmserve.request import PatchesRef
from mmserve.vision.image_plan import ImagePlan, ImageProcessor, plan_image
from mmserve.vision.image_source import PICTURE_SETTINGS, ImageSource, PixelLimits
from mmserve.vision.page_types import PageLimits, PageOptions
from mmserve.vision.page_workers import PageWorker, take_place
from mmserve.vision.patches import PixelPatches, share, unlink
from mmserve.vision.process_memory import give_back_memory

_SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True)
class Processed:
    """A picture's pixels in shared memory, one reference an item of `plan`; whoever gets them has to unlink them."""

    plan: ImagePlan
    patches: tuple[PatchesRef, ...]
    seconds: float


class PreprocessWorker:
    """The work of one process."""

    def __init__(self, processor: ImageProcessor, limits: PageLimits) -> None:
        self._processor = processor
        self._pages = PageWorker(limits, PageOptions(ocr="off"), num_ocr_threads=1)

    def measure(self, source: ImageSource) -> tuple[int, int]:
        """Width and height, as far as headers tell. Raises `DocumentError`."""
        return self._pages.image_size(source.document, source.page, PICTURE_SETTINGS)

    def process(self, source: ImageSource, plan: ImagePlan, limits: PixelLimits) -> Processed:
        """Pixels as `plan` says; where a header has lied about the size, by a plan for the true one."""
        started = time.perf_counter()
        try:
            drawn = self._pages.render_page(source.document, source.page, PICTURE_SETTINGS)
            # What Pillow decoded cannot be written, and torch warns of that.
            pixels = torch.from_numpy(drawn if drawn.flags.writeable else drawn.copy())
            height, width = pixels.shape[:2]
            if (width, height) != (plan.width, plan.height):
                plan = plan_image(self._processor, width, height, limits)
            refs = _share_all(self._processor.process(pixels, plan))
        except (MemoryError, RuntimeError) as error:
            # torch's allocator raises RuntimeError where memory ends
            if isinstance(error, RuntimeError) and "alloc" not in str(error):
                raise
            raise DocumentError("page_too_large", "it takes more memory than one picture may") from None
        finally:
            give_back_memory()
        return Processed(plan, refs, time.perf_counter() - started)

    def close(self) -> None:
        self._pages.close()


def _share_all(items: list[PixelPatches]) -> tuple[PatchesRef, ...]:
    """All of them or none."""
    _require_room(sum(item.pixels.nbytes for item in items))
    refs: list[PatchesRef] = []
    try:
        for item in items:
            refs.append(share(item))
    except BaseException:
        for ref in refs:
            unlink(ref)
        raise
    return tuple(refs)


def _require_room(num_bytes: int) -> None:
    """Shared memory is only found to be full when it is written, and then the process is killed."""
    with contextlib.suppress(FileNotFoundError):
        space = os.statvfs(_SHARED_MEMORY)
        if space.f_bavail * space.f_frsize < num_bytes:
            raise MMServeError(
                "insufficient_memory",
                f"{_SHARED_MEMORY} has no room for the picture's {num_bytes:,} bytes: lower max_pixels, or give it more"
                " memory (in a container, --shm-size)",
            )


def start_preprocess_worker(processor: ImageProcessor, limits: PageLimits) -> PreprocessWorker:
    """Set this process up as a preprocessing worker."""
    torch.set_num_threads(1)
    take_place(limits)
    return PreprocessWorker(processor, limits)
