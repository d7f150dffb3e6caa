"""The pages, pinned: their words and their pixels must stay the same for figures of different engines to compare."""

import hashlib
from pathlib import Path

import pytest
from PIL import Image

from mmserve.bench.pages import draw_page, draw_picture, page_lines, save_page

# sha256 of the RGB bytes, as Pillow's own font draws them.
PIXELS = {
    (0, (1240, 1754)): "caffd90bd480214df20ba3f179969f84305600533ae4afb8a085c79e30af52ff",
    (1, (1240, 1754)): "c61e3bd4b0560edbeaa8d73ae1880fb28a66b8eebbba02be29b374febd568f9e",
    (700, (1240, 1754)): "90b87f3af9203bf5693b07d4693ec0eb24d895e431edf677cc1313b3ffde0b78",
    (3, (300, 400)): "25e59d4a21588b9cdf2fc7a4c24c7a90ba509972a68feb28e78741fc15cfdd44",
}


@pytest.mark.parametrize(("page", "digest"), PIXELS.items())
def test_the_pixels_are_pinned(page: tuple[int, tuple[int, int]], digest: str) -> None:
    number, size = page
    image = draw_page(number, size)
    assert (image.size, image.mode) == (size, "RGB")
    assert hashlib.sha256(image.tobytes()).hexdigest() == digest


def test_the_words_are_pinned() -> None:
    lines = list(page_lines(0))
    assert len(lines) == 62
    assert {len(line.split()) for line in lines} == {24}
    assert (
        hashlib.sha256("\n".join(lines).encode()).hexdigest()
        == "d761c6f41ef4e3c7a7d0f75f15ecc6b1e7f4163b76d60a3eb428cfaa686719ee"
    )


def test_pages_differ() -> None:
    assert len({tuple(page_lines(number)) for number in (*range(96), *range(700, 716))}) == 112


def test_pictures_are_small_and_differ() -> None:
    pictures = [draw_picture(number) for number in range(200)]
    assert len({picture.tobytes() for picture in pictures}) == 200
    assert all(60 <= side < 124 for picture in pictures for side in picture.size)


def test_a_saved_page_has_the_same_pixels_and_is_named_by_its_bytes(tmp_path: Path) -> None:
    page = draw_page(5, (200, 300))
    source = save_page(page, tmp_path / "five.png")
    assert source.document.sha256 == hashlib.sha256((tmp_path / "five.png").read_bytes()).hexdigest()
    with Image.open(source.document.path) as image:
        assert image.tobytes() == page.tobytes()
