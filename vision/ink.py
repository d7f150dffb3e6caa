"""Whether anything is on a page at all."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from PIL import Image

Box = tuple[float, float, float, float]
_MAX_PIXELS = 1_000_000
_PATCH = 32
_CONTRAST = 28
# one speck of 2 x 2 pixels is dust; a full stop at 100 dpi is more
_MIN_INK_PIXELS = 3


def ink_share(pixels: npt.NDArray[np.uint8], ignored: Sequence[Box] = ()) -> float:
    """The share of pixels that differ from the paper around them; dust and uneven light do not count.

    `ignored` boxes are left, top, right, bottom in pixels.
    """
    grey = Image.fromarray(pixels).convert("L")
    factor = int(np.ceil(np.sqrt(max(1.0, grey.width * grey.height / _MAX_PIXELS))))
    grey = grey.reduce(factor) if factor > 1 else grey
    values = np.asarray(grey, dtype=np.float32)
    ink = np.abs(values - _paper(values)) > _CONTRAST
    for box in ignored:
        left, top, right, bottom = (max(0, int(side / factor)) for side in box)
        ink[top : bottom + 1, left : right + 1] = False
    solid = ink[1:, 1:] & ink[:-1, 1:] & ink[1:, :-1] & ink[:-1, :-1]
    count = int(solid.sum()) if solid.size else 0
    return count / solid.size if count >= _MIN_INK_PIXELS else 0.0


def _paper(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The usual brightness around each pixel: medians of patches, smoothed, and the page's own where a patch is odd."""
    height, width = values.shape
    rows, columns = max(1, height // _PATCH), max(1, width // _PATCH)
    cropped = values[: rows * (height // rows), : columns * (width // columns)]
    patches = cropped.reshape(rows, height // rows, columns, width // columns)
    medians = np.median(patches, axis=(1, 3)).astype(np.float32)
    usual = float(np.median(medians))
    medians = np.where(np.abs(medians - usual) > 2 * _CONTRAST, usual, medians).astype(np.float32)
    return np.asarray(Image.fromarray(medians).resize((width, height), Image.Resampling.BILINEAR))
