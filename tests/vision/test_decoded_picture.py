"""Pictures that are decoded already: read as files are, known by their pixels."""

import io
from pathlib import Path

import numpy as np
import pytest
from picture_samples import picture
from PIL import Image

from mmserve.errors import DocumentError, RequestError
from mmserve.vision.decoded_picture import DecodedPicture
from mmserve.vision.image import ImageFile
from mmserve.vision.page_types import PageLimits


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "1", "CMYK"])
def test_a_picture_of_pillow_is_what_its_file_is(mode: str, tmp_path: Path) -> None:
    image = picture((64, 48)).convert(mode)
    path = tmp_path / "picture"
    image.save(path, "TIFF")
    file = ImageFile(path, "picture", "image/tiff", PageLimits())
    decoded = DecodedPicture(image)
    assert np.array_equal(decoded.pixels, file.pixels(1, 16_000_000))
    assert decoded.size == (64, 48)


def test_a_picture_stands_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    target = io.BytesIO()
    picture((64, 48)).save(target, "PNG", exif=exif)
    assert DecodedPicture(Image.open(target)).size == (48, 64)


def test_pixels_are_taken_as_they_are() -> None:
    pixels = np.array(picture((64, 48)))
    assert DecodedPicture(pixels).pixels is pixels
    turned = DecodedPicture(pixels[::-1])
    assert turned.pixels.flags.c_contiguous
    assert np.array_equal(turned.pixels, pixels[::-1])


def test_too_many_pixels_are_scaled_down() -> None:
    width, height = DecodedPicture(np.zeros((3000, 6000, 3), np.uint8)).size
    assert width * height <= 16_000_000
    assert width == pytest.approx(2 * height, abs=2)


def test_a_picture_is_known_by_its_pixels_and_shape() -> None:
    image = picture((64, 48))
    pixels = np.array(image)
    other = pixels.copy()
    other[5, 6, 1] ^= 1
    assert DecodedPicture(image).digest == DecodedPicture(pixels, "a name").digest
    assert DecodedPicture(other).digest != DecodedPicture(pixels).digest
    assert DecodedPicture(pixels.reshape(64, 48, 3)).digest != DecodedPicture(pixels).digest


@pytest.mark.parametrize(
    "pixels",
    [np.zeros((4, 4, 4), np.uint8), np.zeros((4, 4), np.uint8), np.zeros((4, 4, 3)), np.zeros((0, 4, 3), np.uint8)],
    ids=["four channels", "grey", "floats", "empty"],
)
def test_other_arrays_are_refused(pixels: np.ndarray) -> None:
    with pytest.raises(RequestError, match="height, width, 3") as caught:
        DecodedPicture(pixels)
    assert caught.value.code == "invalid_request"


def test_a_picture_that_is_not_whole_is_named() -> None:
    target = io.BytesIO()
    picture((200, 200)).save(target, "PNG")
    broken = Image.open(io.BytesIO(target.getvalue()[:2000]))
    with pytest.raises(DocumentError, match="the scan is damaged") as caught:
        assert DecodedPicture(broken, "the scan").pixels
    assert caught.value.code == "corrupt_document"
