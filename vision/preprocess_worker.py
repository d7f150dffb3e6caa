"""What runs in a preprocessing worker: a process that draws or decodes a picture, and may cut it for the encoder."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from mmserve.errors import DocumentError
from mmserve.request import PatchesRef
from mmserve.vision.image import RGB
from mmserve.vision.image_plan import ImagePlan, ImageProcessor, plan_image
from mmserve.vision.image_source import PICTURE_SETTINGS, ImageSource, PixelLimits
from mmserve.vision.page_types import PageLimits, PageOptions
from mmserve.vision.page_workers import PageWorker, take_place
from mmserve.vision.patches import load, share_all
from mmserve.vision.picture_ref import share_picture
from mmserve.vision.process_memory import give_back_memory, is_out_of_memory

# Where pictures are scaled, normalised and cut: in a worker, or by the engine on its device.
PixelsOn = Literal["worker", "device"]


@dataclass(frozen=True)
class Processed:
    """A picture's pixels in shared memory, one reference an item of `plan`; whoever gets them has to unlink them."""

    plan: ImagePlan
    patches: tuple[PatchesRef, ...]
    seconds: float

    @property
    def segments(self) -> tuple[PatchesRef, ...]:
        """A reference to each segment: the items of a picture that is yet to be cut share one."""
        return tuple({ref.segment: ref for ref in self.patches}.values())


class PreprocessWorker:
    """The work of one process."""

    def __init__(self, processor: ImageProcessor, limits: PageLimits, pixels_on: PixelsOn) -> None:
        self._processor = processor
        self._pixels_on = pixels_on
        self._pages = PageWorker(limits, PageOptions(ocr="off"), num_ocr_threads=1)

    def measure(self, source: ImageSource) -> tuple[int, int]:
        """Width and height, as far as headers tell. Raises `DocumentError`."""
        return self._pages.image_size(source.document, source.page, PICTURE_SETTINGS)

    def process(self, source: ImageSource, plan: ImagePlan, limits: PixelLimits, mark: str) -> Processed:
        """Pixels as `plan` says; where a header has lied about the size, by a plan for the true one.

        `mark` begins the names of the segments.
        """
        started = time.perf_counter()
        with _within_memory():
            drawn = self._pages.render_page(source.document, source.page, PICTURE_SETTINGS)
            height, width = drawn.shape[:2]
            if (width, height) != (plan.width, plan.height):
                plan = plan_image(self._processor, width, height, limits)
            refs = self._share(drawn, plan, mark)
        return Processed(plan, refs, time.perf_counter() - started)

    def cut(self, picture: PatchesRef, plan: ImagePlan, mark: str) -> Processed:
        """A decoded picture, which its owner has shared and will unlink, as patches."""
        started = time.perf_counter()
        with _within_memory():
            refs = share_all(self._processor.process(load(picture).pixels, plan), mark)
        return Processed(plan, refs, time.perf_counter() - started)

    def close(self) -> None:
        self._pages.close()

    def _share(self, drawn: RGB, plan: ImagePlan, mark: str) -> tuple[PatchesRef, ...]:
        if self._pixels_on == "device":
            return share_picture(drawn, plan, mark)
        # What Pillow decoded cannot be written, and torch warns of that.
        pixels = torch.from_numpy(drawn if drawn.flags.writeable else drawn.copy())
        return share_all(self._processor.process(pixels, plan), mark)


@contextmanager
def _within_memory() -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise DocumentError("page_too_large", "it takes more memory than one picture may") from None
    finally:
        give_back_memory()


def start_preprocess_worker(processor: ImageProcessor, limits: PageLimits, pixels_on: PixelsOn) -> PreprocessWorker:
    """Set this process up as a preprocessing worker."""
    torch.set_num_threads(1)
    take_place(limits)
    return PreprocessWorker(processor, limits, pixels_on)
