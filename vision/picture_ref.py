"""A decoded picture on its way to whoever cuts it for the encoder: the pixels in shared memory, and the plan."""

from dataclasses import dataclass

import numpy as np

from mmserve.request import PatchesRef
from mmserve.vision.image import RGB
from mmserve.vision.image_plan import ImagePlan
from mmserve.vision.patches import new_segment, require_room


@dataclass(frozen=True, kw_only=True)
class PictureRef(PatchesRef):
    """Where a picture's pixels lie, uint8 `[height, width, 3]`, and which of the plan's items is meant."""

    plan: ImagePlan
    item: int


def share_picture(pixels: RGB, plan: ImagePlan, mark: str = "") -> tuple[PictureRef, ...]:
    """One reference a planned item, all to one new segment, which whoever gets them has to `unlink`.

    Raises `MMServeError` (`insufficient_memory`) where there is no room.
    """
    require_room(pixels.nbytes)
    segment = new_segment(pixels.nbytes, mark)
    np.ndarray(pixels.shape, pixels.dtype, segment.buf)[:] = pixels
    name = segment.name
    segment.close()
    return tuple(PictureRef(name, pixels.shape, "uint8", plan=plan, item=item) for item in range(len(plan.items)))
