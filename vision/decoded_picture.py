"""A picture that its caller has decoded already, as the source of an image."""

import hashlib
from functools import cached_property

import numpy as np
from PIL import Image

from mmserve.errors import RequestError
from mmserve.vision.image import RGB, decoded_pixels
from mmserve.vision.image_source import PICTURE_SETTINGS, ImageSource


class DecodedPicture:
    """A picture of Pillow's, in any mode, or RGB pixels uint8 `[height, width, 3]`. Leave it as it is while it is used.

    What it takes to read is done when it is first asked for its `size`, `digest` or `pixels`: not in an event loop.
    """

    def __init__(self, picture: Image.Image | RGB, name: str = "the picture") -> None:
        """`name` is what errors call it. Raises `RequestError` for an array of another shape or type, or neither."""
        if not isinstance(picture, np.ndarray | Image.Image):
            raise RequestError(
                "invalid_request",
                f"{name} is of type {type(picture).__name__}: give a picture of Pillow's, or uint8 pixels"
                " [height, width, 3]",
            )
        if isinstance(picture, np.ndarray) and (
            picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3 or not picture.size
        ):
            raise RequestError(
                "invalid_request",
                f"{name} is an array of {picture.dtype} {list(picture.shape)}: give uint8 pixels [height, width, 3]",
            )
        self.name = name
        self._picture = picture

    @cached_property
    def pixels(self) -> RGB:
        """Upright, on white, within the pixels of `PICTURE_SETTINGS`; C-contiguous.

        Raises `DocumentError` for a picture of Pillow's that cannot be read.
        """
        picture, most = self._picture, PICTURE_SETTINGS.max_pixels
        if isinstance(picture, np.ndarray) and picture.shape[0] * picture.shape[1] <= most:
            return np.ascontiguousarray(picture)
        image = Image.fromarray(picture) if isinstance(picture, np.ndarray) else picture
        return decoded_pixels(image, self.name, most)

    @property
    def size(self) -> tuple[int, int]:
        """Width and height."""
        return self.pixels.shape[1], self.pixels.shape[0]

    @cached_property
    def digest(self) -> bytes:
        """Of the pixels, their shape and mode: the picture's identity."""
        # SHA-256 is in the processors: a page takes 3 ms, where BLAKE2 takes 5.
        digest = hashlib.sha256(f"RGB {self.pixels.shape}".encode())
        digest.update(self.pixels.data)
        return digest.digest()[:16]


PictureSource = ImageSource | DecodedPicture
