"""Small sound documents of every kind that mmserve reads: what the mutations of `fuzz_mutations` start from."""

import io
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pikepdf
import reportlab
from PIL import Image, ImageDraw
from reportlab.lib.utils import ImageReader
from reportlab.pdfbase import pdfmetrics
from reportlab.pdfbase.ttfonts import TTFont
from reportlab.pdfgen import canvas

_HEIC = Path(__file__).parent / "vision" / "data" / "two_colors.heic"
_VERA = Path(reportlab.__file__).parent / "fonts" / "Vera.ttf"
_LINES = ("Invoice 20417 of Hallam Pumps", "The total is 1,284.50 EUR.", "It is due on 12 March 2025.")
_SIZE = (96, 64)
# RC4: other ciphers take random numbers.
_LOCK = pikepdf.Encryption(user="", owner="o", R=3, aes=False, metadata=False)


@cache
def corpus() -> dict[str, bytes]:
    """Documents by name; the same bytes at each call with the same libraries."""
    return {**_pdfs(), **_pictures(), **_texts()}


def _pdfs() -> dict[str, bytes]:
    plain = _drawn(_write, _write)
    return {
        "plain.pdf": plain,
        "linearized.pdf": _edited(plain, linearize=True),
        "object_streams.pdf": _edited(plain, object_stream_mode=pikepdf.ObjectStreamMode.generate),
        "owner_password.pdf": _edited(plain, encryption=_LOCK),
        "truetype.pdf": _drawn(_write_truetype),
        "drawing.pdf": _drawn(_draw),
        "form.pdf": _drawn(_fill_form),
        "scan.pdf": _drawn(lambda target: target.drawImage(ImageReader(_picture()), 0, 0, 300, 200)),
        "images.pdf": _edited(plain, _add_images),
        "attachment.pdf": _edited(plain, _attach),
        "turned.pdf": _edited(plain, _turn),
        "shapes.pdf": _edited(plain, _add_shapes),
    }


def _pictures() -> dict[str, bytes]:
    picture = _picture()
    grey = picture.convert("L")
    deep = Image.fromarray(np.linspace(0, 65535, 96 * 64).astype(np.uint16).reshape(64, 96))
    exif = Image.Exif()
    exif[0x112] = 6
    frames: dict[str, Any] = {"save_all": True, "append_images": [grey.convert("RGB"), picture.rotate(180)]}
    mixed: dict[str, Any] = {"save_all": True, "append_images": [grey, picture.convert("CMYK"), deep]}
    clear = picture.copy()
    clear.putalpha(grey)
    return {
        "a.png": _saved(picture, "PNG"),
        "alpha.png": _saved(clear, "PNG"),
        "palette.png": _saved(picture.quantize(16), "PNG", transparency=3),
        "deep.png": _saved(deep, "PNG"),
        "animated.png": _saved(picture, "PNG", **frames),
        "a.jpg": _saved(picture, "JPEG", exif=exif),
        "progressive.jpg": _saved(picture, "JPEG", progressive=True),
        "cmyk.jpg": _saved(picture.convert("CMYK"), "JPEG"),
        "a.gif": _saved(picture.quantize(32), "GIF", **frames),
        "raw.tiff": _saved(picture, "TIFF", **mixed),
        "lzw.tiff": _saved(picture, "TIFF", compression="tiff_lzw"),
        "deflate.tiff": _saved(deep, "TIFF", compression="tiff_adobe_deflate"),
        "fax.tiff": _saved(grey.convert("1"), "TIFF", compression="group4"),
        "jpeg.tiff": _saved(picture, "TIFF", compression="jpeg"),
        "float.tiff": _saved(grey.convert("F"), "TIFF"),
        "lossy.webp": _saved(picture, "WEBP"),
        "lossless.webp": _saved(clear, "WEBP", lossless=True),
        "animated.webp": _saved(picture, "WEBP", **frames),
        "a.bmp": _saved(picture, "BMP"),
        "palette.bmp": _saved(picture.quantize(16), "BMP"),
        "a.avif": _saved(picture, "AVIF"),
        "a.heic": _HEIC.read_bytes(),
    }


def _texts() -> dict[str, bytes]:
    text = "\n".join(_LINES) + "\fGrüße aus Brünn: Ω, 日本, אבג\n"
    return {"utf8.txt": text.encode(), "utf16.txt": text.encode("utf-16")}


def _picture() -> Image.Image:
    picture = Image.radial_gradient("L").resize(_SIZE).convert("RGB")
    draw = ImageDraw.Draw(picture)
    draw.rectangle((10, 10, 80, 40), fill="white")
    draw.text((14, 14), "Total 1,284", fill="black")
    return picture


def _saved(picture: Image.Image, kind: str, **options: Any) -> bytes:
    target = io.BytesIO()
    # Saving leaves an encoder's settings on a picture.
    picture.copy().save(target, kind, **options)
    return target.getvalue()


def _drawn(*pages: Any) -> bytes:
    target = io.BytesIO()
    page = canvas.Canvas(target, pagesize=(300, 200), invariant=True)
    for draw in pages:
        draw(page)
        page.showPage()
    page.save()
    return target.getvalue()


def _write(target: Any) -> None:
    for index, line in enumerate(_LINES):
        target.drawString(20, 160 - 20 * index, line)


def _write_truetype(target: Any) -> None:
    pdfmetrics.registerFont(TTFont("Vera", str(_VERA)))
    target.setFont("Vera", 12)
    target.drawString(20, 160, "The of\ufb01ce is closed; Grüße")
    _write(target)


def _draw(target: Any) -> None:
    target.linearGradient(0, 0, 300, 200, ("red", "blue"))
    target.setDash(3, 2)
    target.bezier(10, 10, 100, 190, 200, 10, 290, 190)
    target.setFillAlpha(0.4)
    target.circle(150, 100, 60, fill=1)
    target.beginForm("stamp")
    target.drawString(10, 10, "Paid")
    target.endForm()
    target.doForm("stamp")


def _fill_form(target: Any) -> None:
    _write(target)
    target.acroForm.textfield(name="name", x=20, y=40, width=120, height=20, value="Ada Lovelace")
    target.acroForm.checkbox(name="paid", x=160, y=40, checked=True)
    target.linkURL("https://example.org", (20, 20, 100, 40))


def _edited(data: bytes, edit: Any = None, **options: Any) -> bytes:
    with pikepdf.open(io.BytesIO(data)) as pdf:
        if edit is not None:
            edit(pdf)
        target = io.BytesIO()
        pdf.save(target, **{"static_id": True, **options})
    return target.getvalue()


def _attach(pdf: pikepdf.Pdf) -> None:
    pdf.attachments["../notes.txt"] = b"notes"


def _turn(pdf: pikepdf.Pdf) -> None:
    for page, angle in zip(pdf.pages, (90, -180), strict=True):
        page.Rotate = angle
        page.CropBox = [10, 10, 290, 190]


def _add_images(pdf: pikepdf.Pdf) -> None:
    """One page with a picture of each kind of compression."""
    fax = Image.open(io.BytesIO(_saved(_picture().convert("1"), "TIFF", compression="group4")))
    tags: Any = fax.tag_v2  # type: ignore[attr-defined]
    start, length = tags[273][0], tags[279][0]
    contents = {
        "DCTDecode": _saved(_picture(), "JPEG"),
        "JPXDecode": _saved(_picture(), "JPEG2000"),
        "CCITTFaxDecode": _saved(_picture().convert("1"), "TIFF", compression="group4")[start : start + length],
        "RunLengthDecode": bytes([127, *range(128), 129, 40, 128]) * 20,
    }
    for name, data in contents.items():
        image = pikepdf.Stream(pdf, data)
        image.Type, image.Subtype = pikepdf.Name.XObject, pikepdf.Name.Image
        image.Width, image.Height = _SIZE
        image.BitsPerComponent = 1 if name == "CCITTFaxDecode" else 8
        image.ColorSpace = pikepdf.Name.DeviceRGB if name in ("DCTDecode", "JPXDecode") else pikepdf.Name.DeviceGray
        image.Filter = pikepdf.Name(f"/{name}")
        if name == "CCITTFaxDecode":
            image.DecodeParms = pikepdf.Dictionary(K=-1, Columns=_SIZE[0], Rows=_SIZE[1])
        pdf.pages[0].add_resource(image, pikepdf.Name.XObject, pikepdf.Name(f"/{name}"))
    drawn = "".join(f"q 60 0 0 40 {20 + 70 * index} 20 cm /{name} Do Q\n" for index, name in enumerate(contents))
    pdf.pages[0].contents_add(drawn.encode())


def _add_shapes(pdf: pikepdf.Pdf) -> None:
    """A tiling pattern, a soft mask, a Type 3 font and a shading by a function of samples."""
    page = pdf.pages[0]
    glyph = pikepdf.Stream(pdf, b"500 0 0 0 500 500 d1 0 0 500 500 re f")
    font = pikepdf.Dictionary(
        Type=pikepdf.Name.Font, Subtype=pikepdf.Name.Type3, FontBBox=[0, 0, 500, 500], FirstChar=97, LastChar=97,
        FontMatrix=[0.001, 0, 0, 0.001, 0, 0], Widths=[500], CharProcs=pikepdf.Dictionary(a=glyph),
        Encoding=pikepdf.Dictionary(Differences=[97, pikepdf.Name.a]), Resources=pikepdf.Dictionary(),
    )  # fmt: skip
    tile = pikepdf.Stream(pdf, b"0.5 g 0 0 5 5 re f")
    tile.PatternType, tile.PaintType, tile.TilingType = 1, 1, 1
    tile.BBox, tile.XStep, tile.YStep, tile.Resources = [0, 0, 10, 10], 10, 10, pikepdf.Dictionary()
    samples = pikepdf.Stream(pdf, bytes(range(0, 240, 10)))
    samples.FunctionType, samples.Domain, samples.Range, samples.Size = 0, [0, 1], [0, 1, 0, 1, 0, 1], [8]
    samples.BitsPerSample = 8
    shading = pikepdf.Dictionary(
        ShadingType=2, ColorSpace=pikepdf.Name.DeviceRGB, Coords=[0, 0, 300, 0], Function=pdf.make_indirect(samples)
    )
    group = pikepdf.Stream(pdf, b"1 g 0 0 150 200 re f")
    group.Type, group.Subtype, group.BBox = pikepdf.Name.XObject, pikepdf.Name.Form, [0, 0, 300, 200]
    group.Group = pikepdf.Dictionary(S=pikepdf.Name.Transparency, CS=pikepdf.Name.DeviceGray)
    state = pikepdf.Dictionary(SMask=pikepdf.Dictionary(S=pikepdf.Name.Luminosity, G=group))
    resources = {"Font": font, "Pattern": tile, "Shading": shading, "ExtGState": state}
    for kind, resource in resources.items():
        page.add_resource(pdf.make_indirect(resource), pikepdf.Name(f"/{kind}"), pikepdf.Name(f"/My{kind}"))
    page.contents_add(
        b"q /MyExtGState gs /MyShading sh Q q /Pattern cs /MyPattern scn 20 20 100 60 re f Q "
        b"BT /MyFont 12 Tf 150 40 Td (aaa) Tj ET"
    )
