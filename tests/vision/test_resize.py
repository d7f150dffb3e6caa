import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from picture_samples import SIZES, picture, pixels
from PIL import Image

from mmserve.vision import resize as resize_module
from mmserve.vision.resize import Filter, Window, resize

PILLOW: dict[Filter, Image.Resampling] = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
# Height and width: both shrink, both grow, one of each, a long strip, to a pixel.
TARGETS = ((56, 56), (1764, 1232), (476, 644), (336, 1500), (1, 1))


def by_pillow(image: Image.Image, size: tuple[int, int], resample: Filter) -> torch.Tensor:
    return torch.from_numpy(np.array(image.resize(size[::-1], PILLOW[resample])))


@pytest.fixture
def by_taps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of other devices, on this one."""
    taps = resize_module._by_taps
    monkeypatch.setattr(resize_module, "_rows_by_blocks", lambda *args: taps(*args, dimension=0))
    monkeypatch.setattr(resize_module, "_columns_by_blocks", lambda *args: taps(*args, dimension=1))


@pytest.mark.parametrize("resample", PILLOW)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("size", SIZES)
def test_equals_pillow(size: tuple[int, int], target: tuple[int, int], resample: Filter) -> None:
    image = picture(size)
    assert torch.equal(resize(pixels(image), target, resample), by_pillow(image, target, resample))


@pytest.mark.usefixtures("by_taps")
@pytest.mark.parametrize("resample", PILLOW)
@pytest.mark.parametrize("target", [(56, 56), (476, 644), (600, 30)])
@pytest.mark.parametrize("size", [(26, 28), (640, 480), (3000, 200), (1, 1)])
def test_sums_over_taps_equal_pillow(size: tuple[int, int], target: tuple[int, int], resample: Filter) -> None:
    image = picture(size)
    assert torch.equal(resize(pixels(image), target, resample), by_pillow(image, target, resample))


side = st.integers(1, 90)


@settings(max_examples=150, deadline=None)
@given(size=st.tuples(side, side), target=st.tuples(side, side), resample=st.sampled_from(list(PILLOW)))
def test_any_size_equals_pillow(size: tuple[int, int], target: tuple[int, int], resample: Filter) -> None:
    """Among them sizes where Pillow takes the rows first: the bytes tell the order."""
    image = picture(size)
    assert torch.equal(resize(pixels(image), target, resample), by_pillow(image, target, resample))


@pytest.mark.parametrize("target", [(900, 336), (336, 900), (100, 640)])
@pytest.mark.parametrize("size", [(640, 480), (200, 700)])
def test_a_window_is_a_part_of_the_whole(size: tuple[int, int], target: tuple[int, int]) -> None:
    image = pixels(picture(size))
    window = Window(top=7, left=20, height=90, width=300)
    whole = resize(image, target, "bicubic")
    assert torch.equal(resize(image, target, "bicubic", window=window), whole[7:97, 20:320])


def test_a_window_without_scaling_is_a_crop() -> None:
    image = pixels(picture((64, 48)))
    assert torch.equal(resize(image, (48, 64), "lanczos", window=Window(5, 9, 20, 30)), image[5:25, 9:39])


def test_same_size_changes_nothing() -> None:
    image = pixels(picture((161, 184)))
    assert torch.equal(resize(image, (184, 161), "bicubic"), image)


@pytest.mark.gpu
@pytest.mark.parametrize("resample", PILLOW)
def test_a_gpu_gives_the_same_bytes(resample: Filter) -> None:
    image = pixels(picture((1240, 1754)))
    assert torch.equal(resize(image.cuda(), (1764, 1232), resample).cpu(), resize(image, (1764, 1232), resample))
