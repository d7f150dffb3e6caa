"""Pages that are the same pixels for every engine, drawn from fixed seeds; and small pictures, all different."""

import hashlib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from PIL import Image, ImageDraw

from mmserve.bench.workloads import PageForm
from mmserve.vision.decoded_picture import DecodedPicture, PictureSource
from mmserve.vision.image_source import PICTURE_SETTINGS, ImageSource
from mmserve.vision.page_types import Document
from mmserve.vision.sniff import PDF_TYPE

A4_SIZE = (1240, 1754)
_MARGIN_LEFT, _MARGIN_TOP, _LINE_HEIGHT, _WORDS_PER_LINE = 90, 80, 26, 24
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def page_lines(number: int, height: int = A4_SIZE[1]) -> Iterator[str]:
    """The text of a page, from the top."""
    rng = random.Random(1000 + number)
    for _ in range(_MARGIN_TOP, height - _MARGIN_TOP, _LINE_HEIGHT):
        yield " ".join(_word(rng) for _ in range(_WORDS_PER_LINE))


def _word(rng: random.Random) -> str:
    return "".join(rng.choice(_LETTERS) for _ in range(rng.randint(2, 9)))


def draw_page(number: int, size: tuple[int, int] = A4_SIZE) -> Image.Image:
    """A white page (width, height) of random words."""
    image = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(image)
    for index, line in enumerate(page_lines(number, size[1])):
        draw.text((_MARGIN_LEFT, _MARGIN_TOP + index * _LINE_HEIGHT), line, fill="black")
    return image


def draw_picture(number: int) -> Image.Image:
    """Noise, 60 to 123 pixels a side."""
    rng = random.Random(number)
    size = rng.randrange(60, 124), rng.randrange(60, 124)
    return Image.frombytes("RGB", size, rng.randbytes(3 * size[0] * size[1]))


def make_pages(numbers: Sequence[int], size: tuple[int, int], form: PageForm, folder: Path) -> list[PictureSource]:
    """Pages of `size` (width, height) as a prompt names them; files go to `folder`."""
    if form == "pixels":
        return [DecodedPicture(draw_page(number, size), f"page {number}") for number in numbers]
    if form == "png":
        return [save_page(draw_page(number, size), folder / f"page-{number}.png") for number in numbers]
    path = folder / f"pages-{numbers[0]}.pdf"
    first, *others = numbers
    rest = (draw_page(number, size) for number in others)
    draw_page(first, size).save(path, "PDF", save_all=True, append_images=rest, resolution=PICTURE_SETTINGS.dpi)
    document = _document(path, PDF_TYPE, len(numbers))
    return [ImageSource(document, page) for page in range(1, len(numbers) + 1)]


def save_page(image: Image.Image, path: Path) -> ImageSource:
    """As a PNG file, and how a prompt names it."""
    image.save(path, "PNG", compress_level=1)
    return ImageSource(_document(path, "image/png", 1))


def _document(path: Path, media_type: str, num_pages: int) -> Document:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Document(path, path.name, media_type, digest, num_pages=num_pages)
