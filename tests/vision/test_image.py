import io
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from broken_pictures import cut_before_last_frame_data, with_transparency
from document_makers import save, write
from PIL import Image, ImageCms, ImageDraw

from mmserve.errors import DocumentError
from mmserve.vision.image import ImageFile, normalise
from mmserve.vision.page_types import PageLimits

BUDGET = 10_000_000
RED, GREEN = (255, 0, 0), (0, 128, 0)


def pixels_of(path: Path, media_type: str, number: int = 1, budget: int = BUDGET) -> npt.NDArray[np.uint8]:
    image = ImageFile(path, path.name, media_type, PageLimits())
    try:
        return image.pixels(number, budget)
    finally:
        image.close()


def is_near(pixel: npt.NDArray[np.uint8], color: tuple[int, int, int], tolerance: int = 12) -> bool:
    return bool((np.abs(pixel.astype(int) - color) <= tolerance).all())


def two_colors() -> Image.Image:
    """Red above, green below; wider than high."""
    picture = Image.new("RGB", (96, 64), RED)
    picture.paste(GREEN, (0, 32, 96, 64))
    return picture


@pytest.mark.parametrize(
    ("orientation", "how"),
    [
        (2, Image.Transpose.FLIP_LEFT_RIGHT),
        (3, Image.Transpose.ROTATE_180),
        (4, Image.Transpose.FLIP_TOP_BOTTOM),
        (5, Image.Transpose.TRANSPOSE),
        (6, Image.Transpose.ROTATE_90),
        (7, Image.Transpose.TRANSVERSE),
        (8, Image.Transpose.ROTATE_270),
    ],
)
@pytest.mark.parametrize(
    ("suffix", "media_type"), [("jpg", "image/jpeg"), ("png", "image/png"), ("webp", "image/webp")]
)
def test_orientation_is_applied(
    tmp_path: Path, orientation: int, how: Image.Transpose, suffix: str, media_type: str
) -> None:
    upright = two_colors()
    upright.paste("blue", (0, 0, 16, 16))
    exif = Image.Exif()
    exif[0x112] = orientation
    path = save(tmp_path, f"a.{suffix}", upright.transpose(how), exif=exif)
    pixels = pixels_of(path, media_type)
    assert pixels.shape == (64, 96, 3)
    assert is_near(pixels[6, 6], (0, 0, 255), 40)
    assert is_near(pixels[20, 80], RED, 30)
    assert is_near(pixels[60, 80], GREEN, 30)


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_impossible_orientation_is_ignored(tmp_path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x112] = orientation
    path = save(tmp_path, "a.jpg", two_colors(), exif=exif)
    assert pixels_of(path, "image/jpeg").shape == (64, 96, 3)


def test_broken_exif_is_ignored(tmp_path: Path) -> None:
    path = save(tmp_path, "a.jpg", two_colors(), exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff" + b"\xff" * 40)
    assert pixels_of(path, "image/jpeg").shape == (64, 96, 3)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_paper_is_white(tmp_path: Path, mode: str) -> None:
    picture = Image.new("RGBA", (60, 40), (0, 0, 0, 0))
    ImageDraw.Draw(picture).rectangle((20, 10, 40, 30), fill=(0, 0, 0, 255))
    converted = picture.quantize(8) if mode == "P" else picture.convert(mode)
    pixels = pixels_of(save(tmp_path, "a.png", converted), "image/png")
    assert is_near(pixels[2, 2], (255, 255, 255))
    assert is_near(pixels[20, 30], (0, 0, 0))


def test_white_ink_on_nothing_stays_readable(tmp_path: Path) -> None:
    picture = Image.new("RGBA", (60, 40), (255, 255, 255, 0))
    ImageDraw.Draw(picture).rectangle((20, 10, 40, 30), fill=(255, 255, 255, 255))
    pixels = pixels_of(save(tmp_path, "a.png", picture), "image/png")
    assert pixels.min() == 0
    assert pixels.max() == 255


@pytest.mark.parametrize(("suffix", "media_type"), [("png", "image/png"), ("tiff", "image/tiff")])
def test_sixteen_bit_grey_is_scaled(tmp_path: Path, suffix: str, media_type: str) -> None:
    ramp = np.tile(np.linspace(0, 65535, 256).astype(np.uint16), (8, 1))
    pixels = pixels_of(save(tmp_path, f"a.{suffix}", Image.fromarray(ramp)), media_type)
    assert np.abs(pixels[0, :, 0].astype(int) - np.arange(256)).max() <= 1


def test_floating_point_grey_is_scaled(tmp_path: Path) -> None:
    ramp = np.tile(np.linspace(0, 1, 256, dtype=np.float32), (8, 1))
    pixels = pixels_of(save(tmp_path, "a.tiff", Image.fromarray(ramp)), "image/tiff")
    assert np.abs(pixels[0, :, 0].astype(int) - np.arange(256)).max() <= 1


def test_sixteen_bit_grey_that_counts_from_white_is_inverted(tmp_path: Path) -> None:
    ramp = np.tile(np.linspace(0, 65535, 256).astype(np.uint16), (8, 1))
    pixels = pixels_of(save(tmp_path, "a.tiff", Image.fromarray(ramp), tiffinfo={262: 0}), "image/tiff")
    assert np.abs(pixels[0, :, 0].astype(int) - np.arange(256)[::-1]).max() <= 1


@pytest.mark.parametrize(("suffix", "media_type"), [("jpg", "image/jpeg"), ("tiff", "image/tiff")])
def test_cmyk_is_not_inverted(tmp_path: Path, suffix: str, media_type: str) -> None:
    """Pillow writes CMYK JPEG as Adobe does: inverted, with Adobe's marker."""
    path = save(tmp_path, f"a.{suffix}", two_colors().convert("CMYK"))
    pixels = pixels_of(path, media_type)
    assert is_near(pixels[10, 50], RED, 30)
    assert is_near(pixels[50, 50], GREEN, 30)


def test_lab_keeps_its_lightness(tmp_path: Path) -> None:
    picture = Image.new("RGB", (32, 32), "white")
    picture.paste("black", (0, 0, 16, 32))
    transform: Any = ImageCms.buildTransform(
        ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"), "RGB", "LAB"
    )
    lab = ImageCms.applyTransform(picture, transform)
    assert lab is not None
    pixels = pixels_of(save(tmp_path, "a.tiff", lab), "image/tiff")
    assert pixels[16, 4].max() < 20
    assert pixels[16, 28].min() > 235


@pytest.mark.parametrize("mode", ["1", "P", "L"])
def test_few_levels_keep_black_and_white(tmp_path: Path, mode: str) -> None:
    picture = Image.new("L", (32, 32), 255)
    picture.paste(0, (0, 0, 16, 32))
    pixels = pixels_of(save(tmp_path, "a.png", picture.convert(mode)), "image/png")
    assert is_near(pixels[16, 4], (0, 0, 0))
    assert is_near(pixels[16, 28], (255, 255, 255))


def test_every_frame_of_a_tiff_is_a_page_but_previews_are_not(tmp_path: Path) -> None:
    from PIL import TiffImagePlugin

    preview_tags = TiffImagePlugin.ImageFileDirectory_v2()
    preview_tags[254] = 1
    preview = Image.new("L", (10, 10))
    preview.encoderinfo = {"tiffinfo": preview_tags}
    frames = [two_colors().convert("1"), preview, two_colors().convert("CMYK")]
    path = save(tmp_path, "a.tiff", two_colors(), save_all=True, append_images=frames)
    image = ImageFile(path, "a.tiff", "image/tiff", PageLimits())
    assert image.num_pages == 3
    assert [image.size(number) for number in (1, 2, 3)] == [(96, 64)] * 3
    assert is_near(image.pixels(3, BUDGET)[10, 50], RED, 30)
    assert is_near(image.pixels(1, BUDGET)[50, 50], GREEN, 30)
    image.close()


@pytest.mark.parametrize(("suffix", "media_type"), [("gif", "image/gif"), ("webp", "image/webp"), ("png", "image/png")])
def test_of_an_animation_the_first_frame_is_the_page(tmp_path: Path, suffix: str, media_type: str) -> None:
    path = save(
        tmp_path,
        f"a.{suffix}",
        two_colors(),
        save_all=True,
        append_images=[Image.new("RGB", (96, 64), color) for color in ("blue", "black")],
    )
    image = ImageFile(path, path.name, media_type, PageLimits())
    assert image.num_pages == 1
    assert image.notes == ("The first of 3 frames is read.",)
    assert is_near(image.pixels(1, BUDGET)[10, 50], RED, 40)
    image.close()


def test_heic_is_decoded() -> None:
    pixels = pixels_of(Path(__file__).parent / "data" / "two_colors.heic", "image/heic")
    assert pixels.shape == (64, 96, 3)
    assert is_near(pixels[10, 50], RED, 40)
    assert is_near(pixels[50, 50], GREEN, 40)


def test_half_a_heic_is_refused(tmp_path: Path) -> None:
    data = (Path(__file__).parent / "data" / "two_colors.heic").read_bytes()
    with pytest.raises(DocumentError) as caught:
        pixels_of(write(tmp_path, "a.heic", data[: len(data) - 40]), "image/heic")
    assert caught.value.code == "corrupt_document"


def png_bomb(side: int) -> bytes:
    """A valid 1-bit PNG of `side` x `side`, all black."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    header = side.to_bytes(4, "big") * 2 + bytes([1, 0, 0, 0, 0])
    rows = zlib.compress(bytes((side // 8 + 1) * side), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_pixel_bomb_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    with pytest.raises(DocumentError) as caught:
        ImageFile(write(tmp_path, "bomb.png", png_bomb(30_000)), "bomb.png", "image/png", PageLimits())
    assert caught.value.code == "page_too_large"
    assert "30000 x 30000" in caught.value.message


def test_a_large_frame_behind_a_small_one_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, "a.tiff", two_colors(), save_all=True, append_images=[Image.new("1", (3000, 3000))])
    image = ImageFile(path, "a.tiff", "image/tiff", PageLimits(max_pixels=1_000_000))
    assert image.pixels(1, BUDGET).shape == (64, 96, 3)
    with pytest.raises(DocumentError) as caught:
        image.pixels(2, BUDGET)
    assert caught.value.code == "page_too_large"
    image.close()


def test_too_many_frames_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path, "a.tiff", two_colors(), save_all=True, append_images=[two_colors()] * 4)
    with pytest.raises(DocumentError) as caught:
        ImageFile(path, "a.tiff", "image/tiff", PageLimits(max_pages=4))
    assert caught.value.code == "too_many_pages"


@pytest.mark.parametrize(
    ("format_name", "media_type"),
    [
        ("PNG", "image/png"),
        ("JPEG", "image/jpeg"),
        ("WEBP", "image/webp"),
        ("TIFF", "image/tiff"),
        ("GIF", "image/gif"),
        ("BMP", "image/bmp"),
        ("AVIF", "image/avif"),
    ],
)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_half_a_picture_is_never_passed_off_as_whole(
    tmp_path: Path, format_name: str, media_type: str, share: float
) -> None:
    buffer = io.BytesIO()
    noise = Image.effect_noise((300, 200), 80).convert("RGB")
    noise.save(buffer, format_name, **({"progressive": True} if format_name == "JPEG" else {}))
    data = buffer.getvalue()
    path = write(tmp_path, "a.bin", data[: int(len(data) * share)])
    with pytest.raises(DocumentError) as caught:
        pixels_of(path, media_type)
    assert caught.value.code == "corrupt_document"


def test_pictures_are_scaled_down_to_the_budget(tmp_path: Path) -> None:
    path = save(tmp_path, "a.jpg", Image.new("RGB", (4000, 2000), RED))
    pixels = pixels_of(path, "image/jpeg", budget=80_000)
    assert pixels.shape[0] * pixels.shape[1] <= 80_000
    assert pixels.shape[1] / pixels.shape[0] == pytest.approx(2.0, rel=0.02)
    assert is_near(pixels[5, 5], RED)


@pytest.mark.parametrize("size", [(1, 1), (26, 28), (1, 5000)])
def test_small_and_thin_pictures_are_decoded(tmp_path: Path, size: tuple[int, int]) -> None:
    pixels = pixels_of(save(tmp_path, "a.png", Image.new("RGB", size)), "image/png", budget=1000)
    assert pixels.ndim == 3
    assert pixels.shape[0] >= 1


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "I", "F", "I;16"])
def test_a_picture_of_any_mode_is_a_page_of_a_tiff(tmp_path: Path, mode: str) -> None:
    """Black on the left, white on the right, as the second page behind one in color."""
    half = Image.new("L", (64, 32), 255)
    half.paste(0, (0, 0, 32, 32))
    if mode == "I;16":
        page = Image.fromarray(np.asarray(half).astype(np.uint16) * 257)
    else:
        page = half.convert("RGB").convert("L" if mode == "I" else mode)
        page = Image.fromarray(np.asarray(half).astype(np.int32)) if mode == "I" else page
    path = save(tmp_path, "a.tiff", two_colors(), save_all=True, append_images=[page])
    pixels = pixels_of(path, "image/tiff", number=2)
    assert pixels.shape == (32, 64, 3)
    assert is_near(pixels[16, 8], (0, 0, 0))
    assert is_near(pixels[16, 56], (255, 255, 255))
    assert is_near(pixels_of(path, "image/tiff")[10, 50], RED)


@pytest.mark.parametrize("mode", ["La", "LA", "PA", "RGBa", "RGBA"])
def test_every_mode_with_transparency_is_laid_on_white(mode: str) -> None:
    clear = Image.new("RGBA", (40, 40), (0, 0, 0, 0))
    ImageDraw.Draw(clear).rectangle((10, 10, 30, 30), fill=(0, 0, 0, 255))
    through = {"La": ("LA", "La"), "PA": ("P", "PA")}.get(mode, (mode,))
    picture = clear
    for step in through:
        picture = picture.convert(step)
    pixels = np.asarray(normalise(picture, BUDGET))
    assert is_near(pixels[20, 20], (0, 0, 0))
    assert is_near(pixels[2, 2], (255, 255, 255)) or mode == "PA"


@pytest.mark.parametrize(("suffix", "media_type"), [("webp", "image/webp"), ("avif", "image/avif")])
def test_transparency_of_webp_and_avif_is_laid_on_white(tmp_path: Path, suffix: str, media_type: str) -> None:
    clear = Image.new("RGBA", (64, 64), (0, 0, 0, 0))
    ImageDraw.Draw(clear).rectangle((20, 20, 44, 44), fill=(0, 0, 0, 255))
    pixels = pixels_of(save(tmp_path, f"a.{suffix}", clear), media_type)
    assert is_near(pixels[4, 4], (255, 255, 255))
    assert is_near(pixels[32, 32], (0, 0, 0))


@pytest.mark.parametrize("codec", ["webp", "avif"])
def test_a_codec_that_is_missing_is_named(tmp_path: Path, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path, f"a.{codec}", two_colors())
    monkeypatch.setattr("PIL.features.check", lambda name: name != codec)
    with pytest.raises(DocumentError) as caught:
        pixels_of(path, f"image/{codec}")
    assert caught.value.code == "unsupported_type"
    assert codec.upper() in caught.value.message


@pytest.mark.parametrize(("suffix", "media_type"), [("tiff", "image/tiff"), ("avif", "image/avif")])
def test_orientation_of_other_formats_is_applied(tmp_path: Path, suffix: str, media_type: str) -> None:
    exif = Image.Exif()
    exif[0x112] = 6
    lying = two_colors().transpose(Image.Transpose.ROTATE_90)
    options: dict[str, Any] = {"tiffinfo": {274: 6}} if suffix == "tiff" else {"exif": exif}
    pixels = pixels_of(save(tmp_path, f"a.{suffix}", lying, **options), media_type)
    assert pixels.shape == (64, 96, 3)
    assert is_near(pixels[10, 50], RED, 40)
    assert is_near(pixels[50, 50], GREEN, 40)


def test_each_frame_stands_upright_by_its_own_orientation(tmp_path: Path) -> None:
    lying = two_colors().transpose(Image.Transpose.ROTATE_90)
    lying.encoderinfo = {"tiffinfo": {274: 6}}
    path = save(tmp_path, "a.tiff", two_colors(), save_all=True, append_images=[lying])
    for number in (1, 2):
        pixels = pixels_of(path, "image/tiff", number=number)
        assert pixels.shape == (64, 96, 3)
        assert is_near(pixels[10, 50], RED, 40)


def test_twelve_bits_in_sixteen_are_scaled(tmp_path: Path) -> None:
    ramp = np.tile(np.linspace(0, 4095, 256).astype(np.uint16), (8, 1))
    pixels = pixels_of(save(tmp_path, "a.tiff", Image.fromarray(ramp)), "image/tiff")
    assert np.abs(pixels[0, :, 0].astype(int) - np.arange(256)).max() <= 1


def test_an_animation_whose_second_frame_is_broken_is_refused(tmp_path: Path) -> None:
    whole = save(tmp_path, "a.gif", two_colors(), save_all=True, append_images=[Image.new("RGB", (96, 64), "blue")])
    path = write(tmp_path, "b.gif", cut_before_last_frame_data(whole.read_bytes()))
    with pytest.raises(DocumentError) as caught:
        ImageFile(path, "b.gif", "image/gif", PageLimits())
    assert caught.value.code == "corrupt_document"


def test_a_transparent_color_beyond_the_palette_is_refused(tmp_path: Path) -> None:
    data = with_transparency(save(tmp_path, "a.png", two_colors().quantize(8)).read_bytes(), b"\xff" * 300 + b"\0")
    with pytest.raises(DocumentError) as caught:
        pixels_of(write(tmp_path, "b.png", data), "image/png")
    assert caught.value.code == "corrupt_document"


@pytest.mark.parametrize(
    ("compression", "mode"),
    [
        ("tiff_lzw", "RGB"),
        ("tiff_adobe_deflate", "RGB"),
        ("jpeg", "RGB"),
        ("packbits", "1"),
        ("group3", "1"),
        ("group4", "1"),
    ],
)
@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
def test_half_a_tiff_of_any_compression_is_refused(tmp_path: Path, compression: str, mode: str, share: float) -> None:
    noise = Image.effect_noise((300, 200), 80).convert("RGB").convert(mode)
    data = save(tmp_path, "a.tiff", noise, compression=compression).read_bytes()
    with pytest.raises(DocumentError) as caught:
        pixels_of(write(tmp_path, "b.tiff", data[: int(len(data) * share)]), "image/tiff")
    assert caught.value.code == "corrupt_document"


def test_of_a_cut_off_fax_the_whole_pages_are_read(tmp_path: Path) -> None:
    """The list of frames is whole, the last one's data is not."""
    noise = Image.effect_noise((300, 200), 80)
    data = save(tmp_path, "a.tiff", two_colors(), save_all=True, append_images=[noise]).read_bytes()
    image = ImageFile(write(tmp_path, "b.tiff", data[:-500]), "b.tiff", "image/tiff", PageLimits())
    assert is_near(image.pixels(1, BUDGET)[10, 50], RED)
    with pytest.raises(DocumentError) as caught:
        image.pixels(2, BUDGET)
    assert caught.value.code == "corrupt_document"
    image.close()


def test_a_picture_that_takes_too_much_memory_to_measure_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhaust(self: object) -> None:
        raise MemoryError

    image = ImageFile(save(tmp_path, "a.png", two_colors()), "a.png", "image/png", PageLimits())
    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load_end", exhaust)
    with pytest.raises(DocumentError) as caught:
        image.size(1)
    assert caught.value.code == "page_too_large"
    image.close()
