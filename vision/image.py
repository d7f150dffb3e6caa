"""Picture files -> RGB pixels as a person expects to see them: upright, on white, all of the depth used."""

import struct
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError, features

from mmserve.errors import DocumentError
from mmserve.vision.page_types import PageLimits

_ORIENTATION = 0x0112
_NEW_SUBFILE_TYPE = 254
_PHOTOMETRIC = 262
_WHITE_OF_12_BITS = 4095
_FORMATS = {
    "image/png": "PNG",
    "image/jpeg": "JPEG",
    "image/gif": "GIF",
    "image/tiff": "TIFF",
    "image/webp": "WEBP",
    "image/bmp": "BMP",
    "image/avif": "AVIF",
    "image/heic": "HEIF",
}
_CODECS_THAT_MAY_LACK = {"image/webp": "webp", "image/avif": "avif"}
# what a decoder of Pillow raises for bad bytes, besides its own error
_DECODE_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    struct.error,
    EOFError,
    RuntimeError,
)
_TO_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
RGB = npt.NDArray[np.uint8]


class ImageFile:
    """An open picture. Every frame of a TIFF is a page; of an animation the first frame is."""

    def __init__(self, path: Path, name: str, media_type: str, limits: PageLimits) -> None:
        """Reads headers only. Raises `DocumentError`: `corrupt_document`, `page_too_large`, `too_many_pages`."""
        self._name = name
        self._limits = limits
        self._image = self._open(path, media_type)
        try:
            self._check_size(self._image)
            self._frames = self._find_frames() if media_type == "image/tiff" else [0]
            self.notes = self._frame_notes(media_type)
        except DocumentError:
            self.close()
            raise
        self.num_pages = len(self._frames)

    def _open(self, path: Path, media_type: str) -> Image.Image:
        if media_type == "image/heic":
            import pi_heif

            pi_heif.register_heif_opener(thumbnails=False)
        codec = _CODECS_THAT_MAY_LACK.get(media_type)
        if codec is not None and not features.check(codec):
            raise DocumentError(
                "unsupported_type",
                f"{self._name} is {codec.upper()}, which the Pillow here cannot read: save it as PNG",
            )
        # sizes are checked here, against the limits of this reader
        Image.MAX_IMAGE_PIXELS = None
        with self._decoding("it cannot be opened"):
            return Image.open(path, formats=[_FORMATS[media_type], *(["MPO"] if media_type == "image/jpeg" else [])])

    def size(self, number: int) -> tuple[int, int]:
        """Width and height of a page in pixels, upright."""
        self._seek(number)
        width, height = self._image.size
        # What stands behind the pixels of a PNG is found by reading them.
        with self._decoding("it is not whole"):
            is_lying = _orientation(self._image) in (5, 6, 7, 8)
        return (height, width) if is_lying else (width, height)

    def fitted_size(self, number: int, max_pixels: int) -> tuple[int, int]:
        """Width and height of what `pixels` gives, as far as the file's headers tell."""
        return _fit(self.size(number), max_pixels)

    def pixels(self, number: int, max_pixels: int) -> RGB:
        """RGB [height, width, 3] of a page, scaled down to `max_pixels`.

        Raises `DocumentError`: `corrupt_document` for a picture that is not whole, `page_too_large`.
        """
        self._seek(number)
        with self._decoding("it is not whole"):
            self._image.draft("RGB", _fit(self._image.size, max_pixels))
            self._image.load()
            return np.asarray(normalise(self._image, max_pixels))

    def close(self) -> None:
        self._image.close()

    def _seek(self, number: int) -> None:
        with self._decoding(f"page {number} cannot be found"):
            self._image.seek(self._frames[number - 1])
        self._check_size(self._image)

    def _check_size(self, image: Image.Image) -> None:
        width, height = image.size
        if width * height > self._limits.max_pixels:
            raise DocumentError(
                "page_too_large",
                f"{self._name} is {width} x {height} pixels, over {self._limits.max_pixels:,}: scale it down",
            )

    def _find_frames(self) -> list[int]:
        """Indices of the frames that are pages: previews in reduced resolution are not."""
        frames: list[int] = []
        index = 0
        while True:
            with self._decoding("its list of frames is broken"):
                try:
                    self._image.seek(index)
                except EOFError:
                    break
                tags: Any = getattr(self._image, "tag_v2", {})
                is_preview = bool(int(tags.get(_NEW_SUBFILE_TYPE, 0) or 0) & 1)
            frames += [] if is_preview else [index]
            index += 1
            if len(frames) > self._limits.max_pages:
                raise DocumentError(
                    "too_many_pages", f"{self._name} has more than {self._limits.max_pages} frames; that many are read"
                )
        return frames or [0]

    def _frame_notes(self, media_type: str) -> tuple[str, ...]:
        with self._decoding("its list of frames is broken"):
            count = int(getattr(self._image, "n_frames", 1)) if media_type != "image/tiff" else 1
        return (f"The first of {count} frames is read.",) if count > 1 else ()

    def _decoding(self, complaint: str) -> AbstractContextManager[None]:
        return _reporting(self._name, complaint)


def decoded_pixels(image: Image.Image, name: str, max_pixels: int) -> RGB:
    """RGB [height, width, 3] of an open picture, as `ImageFile.pixels` gives them.

    Raises `DocumentError`: `corrupt_document` for a picture that is not whole, `page_too_large`.
    """
    with _reporting(name, "it is not whole"):
        return np.asarray(normalise(image, max_pixels))


@contextmanager
def _reporting(name: str, complaint: str) -> Iterator[None]:
    """Whatever a decoder makes of bad bytes becomes one sentence."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (UnidentifiedImageError, Image.DecompressionBombError, *_DECODE_ERRORS):
        raise DocumentError("corrupt_document", f"{name} is damaged: {complaint}") from None
    except MemoryError:
        raise DocumentError("page_too_large", f"{name} takes more memory than one page may") from None


def normalise(image: Image.Image, max_pixels: int) -> Image.Image:
    """A decoded picture of any mode -> an upright RGB picture of at most `max_pixels`, transparent parts white."""
    orientation = _orientation(image)
    image = _to_common_mode(image)
    if image.size != _fit(image.size, max_pixels):
        image = image.resize(_fit(image.size, max_pixels), Image.Resampling.BOX, reducing_gap=2.0)
    image = _on_white(image) if image.mode == "RGBA" else image.convert("RGB")
    return _upright(image, orientation)


def _orientation(image: Image.Image) -> int:
    """EXIF orientation 1 to 8; anything else, or EXIF that cannot be read, is no orientation."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = image.getexif().get(_ORIENTATION, 1)
    except _DECODE_ERRORS:
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _upright(image: Image.Image, orientation: int) -> Image.Image:
    transpose = _TO_UPRIGHT.get(orientation)
    return image if transpose is None else image.transpose(transpose)


def _fit(size: tuple[int, int], max_pixels: int) -> tuple[int, int]:
    width, height = size
    if width * height <= max_pixels:
        return size
    scale = (max_pixels / (width * height)) ** 0.5
    return max(1, int(width * scale)), max(1, int(height * scale))


def _to_common_mode(image: Image.Image) -> Image.Image:
    """To L, RGB or RGBA."""
    if image.mode.startswith("I") or image.mode == "F":
        return _eight_bits(image)
    if image.mode == "La":
        image = image.convert("LA")
    if image.has_transparency_data:
        return image if image.mode == "RGBA" else image.convert("RGBA")
    if image.mode == "LAB":
        return image.getchannel("L")
    if image.mode in ("L", "RGB"):
        return image
    return image.convert("L" if image.mode == "1" else "RGB")


def _eight_bits(image: Image.Image) -> Image.Image:
    """Deep grey scaled, not clipped: 16 bits by their range, 32 bits and floats by what they hold.

    Scanners also put 12 bits into 16, which would be nearly black.
    """
    values = np.asarray(image)
    if image.mode.startswith("I;16"):
        grey = (values >> (8 if values.max() > _WHITE_OF_12_BITS else 4)).astype(np.uint8)
        tags: Any = getattr(image, "tag_v2", {})
        is_white_zero = tags.get(_PHOTOMETRIC) == 0
        return Image.fromarray(~grey if is_white_zero else grey)
    low, high = _range(values)
    grey = np.clip((np.nan_to_num(values) - low) * (255.0 / max(high - low, 1e-12)), 0, 255).round().astype(np.uint8)
    return Image.fromarray(grey)


def _range(values: npt.NDArray[Any]) -> tuple[float, float]:
    """Black and white: 0 and the usual largest value where all fits below it, else what is there."""
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    white = next((white for white in (1.0, 255.0, 65535.0) if high <= white), high)
    return (0.0, white) if low >= 0 else (low, high)


def _on_white(image: Image.Image) -> Image.Image:
    """Composed on white; white ink on nothing, which would vanish, on black."""
    for color in ("white", "black"):
        composed = Image.new("RGBA", image.size, color)
        composed.alpha_composite(image)
        flat = composed.convert("RGB")
        if any(channel.getextrema()[0] != channel.getextrema()[1] for channel in flat.split()):
            return flat
    return Image.new("RGB", image.size, "white")
