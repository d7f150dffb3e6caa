"""From an engine's requests to what its encoder takes, on its device."""

from collections import OrderedDict
from collections.abc import Sequence

import torch

from mmserve.request import ImageSpan, PatchesRef
from mmserve.vision.image_plan import ImageProcessor
from mmserve.vision.image_source import PixelLimits
from mmserve.vision.patches import PixelPatches, load
from mmserve.vision.picture_ref import PictureRef

# Pictures whose other pieces wait on the device; one of many tiles takes up to 100 MB.
_MAX_WAITING = 2


class PixelLoader:
    """Takes patches from shared memory as they are, and scales and cuts pictures: each once, for all of its pieces.

    Nothing waits for the device. `processor` is None for a model that reads text only.
    """

    def __init__(self, processor: ImageProcessor | None, device: torch.device) -> None:
        self._processor = processor
        self._device = device
        self._waiting: OrderedDict[str, dict[int, PixelPatches]] = OrderedDict()

    def load(self, spans: Sequence[ImageSpan]) -> list[PixelPatches]:
        """What the encoder takes, one a span."""
        return [self._load(span.patches) for span in spans if span.patches is not None]

    def blank(self, width: int, height: int) -> list[PixelPatches]:
        """What a white picture becomes: to warm an encoder up, or to see what memory it takes."""
        assert self._processor is not None
        pixels = torch.full((height, width, 3), 255, dtype=torch.uint8, device=self._device)
        return self._processor.process(pixels, self._processor.plan(width, height, PixelLimits()))

    def _load(self, ref: PatchesRef) -> PixelPatches:
        if not isinstance(ref, PictureRef):
            return load(ref, self._device)
        pieces = self._waiting.pop(ref.segment, {})
        if ref.item not in pieces:
            pieces = dict(enumerate(self._cut(ref)))
        patches = pieces.pop(ref.item)
        if pieces:
            self._waiting[ref.segment] = pieces
            while len(self._waiting) > _MAX_WAITING:
                self._waiting.popitem(last=False)
        return patches

    def _cut(self, ref: PictureRef) -> list[PixelPatches]:
        assert self._processor is not None
        return self._processor.process(load(ref, self._device).pixels, ref.plan)
