import numpy as np
import pytest
from document_makers import picture_of
from PIL import Image, ImageDraw

from mmserve.vision.ink import ink_share

SIZE = (1240, 1754)


def noisy(brightness: int, deviation: float) -> Image.Image:
    noise = np.random.default_rng(3).normal(brightness, deviation, (SIZE[1], SIZE[0]))
    return Image.fromarray(np.clip(noise, 0, 255).astype(np.uint8)).convert("RGB")


def shaded() -> Image.Image:
    ramp = np.tile(np.linspace(150, 250, SIZE[0]).astype(np.uint8), (SIZE[1], 1))
    return Image.fromarray(ramp).convert("RGB")


@pytest.mark.parametrize(
    "picture",
    [
        Image.new("RGB", SIZE, "white"),
        Image.new("RGB", SIZE, "black"),
        Image.new("RGB", (1, 1), "white"),
        Image.new("RGB", (5, 3000), "grey"),
        noisy(245, 6),
        noisy(215, 12),
        shaded(),
    ],
)
def test_paper_has_no_ink(picture: Image.Image) -> None:
    assert ink_share(np.asarray(picture)) == 0.0


def test_a_page_number_is_ink() -> None:
    page = noisy(240, 6)
    page.paste(picture_of(["7"], size=(90, 90), font_size=24), (600, 1600))
    assert 0 < ink_share(np.asarray(page)) < 0.001


def test_pale_grey_print_is_ink() -> None:
    page = picture_of(["A faint stamp"], size=SIZE, ink="#b0b0b0")
    assert ink_share(np.asarray(page)) > 0


def test_a_hairline_is_ink() -> None:
    page = Image.new("RGB", (800, 1100), "white")
    ImageDraw.Draw(page).line((100, 500, 700, 500), fill="black", width=2)
    assert ink_share(np.asarray(page)) > 0


def test_ink_in_ignored_places_does_not_count() -> None:
    page = picture_of(["A stamp"], size=(800, 600))
    assert ink_share(np.asarray(page), [(30, 30, 300, 90)]) == 0.0
    assert ink_share(np.asarray(page), [(30, 300, 300, 400)]) > 0
