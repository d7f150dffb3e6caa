"""Documents for tests, made on the spot."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pikepdf
from PIL import Image, ImageDraw, ImageFont
from reportlab.pdfgen import canvas

PROSE = (
    "The committee met on Tuesday to discuss the budget for the coming year.",
    "Members agreed that repairs to the northern bridge cannot wait until spring.",
    "The treasurer reported a surplus of 4,210 pounds after all invoices were paid.",
    "A vote was taken and the proposal to hire a second engineer was accepted.",
    "The chairman thanked everyone and closed the meeting at half past nine.",
)
A4 = (595, 842)


def draw_pdf(*pages: Callable[[Any], None], size: tuple[float, float] = A4) -> bytes:
    """A PDF whose pages the functions draw on reportlab's canvas."""
    buffer = io.BytesIO()
    target = canvas.Canvas(buffer, pagesize=size)
    for draw in pages:
        draw(target)
        target.showPage()
    target.save()
    return buffer.getvalue()


def write_lines(lines: Sequence[str], *, left: float = 72, top: float = 760, leading: float = 18) -> Any:
    def draw(target: Any) -> None:
        for index, line in enumerate(lines):
            target.drawString(left, top - leading * index, line)

    return draw


def draw_nothing(target: Any) -> None:
    target.setFont("Helvetica", 12)


def draw_picture(picture: Image.Image, box: tuple[float, float, float, float] = (0, 0, *A4)) -> Any:
    """`box` is left, bottom, width, height in points."""

    def draw(target: Any) -> None:
        from reportlab.lib.utils import ImageReader

        target.drawImage(ImageReader(picture), *box)

    return draw


def edit_pdf(data: bytes, edit: Callable[[pikepdf.Pdf], None], **save_options: Any) -> bytes:
    with pikepdf.open(io.BytesIO(data)) as pdf:
        edit(pdf)
        buffer = io.BytesIO()
        pdf.save(buffer, **save_options)
    return buffer.getvalue()


def with_character_map(data: bytes, mapping: str) -> bytes:
    """The PDF with every font's ToUnicode replaced by lines of a `beginbfrange`."""

    def edit(pdf: pikepdf.Pdf) -> None:
        cmap = (
            "/CIDInit /ProcSet findresource begin 12 dict begin begincmap /CMapName /Test def /CMapType 2 def\n"
            "1 begincodespacerange <00> <FF> endcodespacerange\n"
            f"{len(mapping.splitlines())} beginbfrange\n{mapping}\nendbfrange endcmap end end"
        )
        for page in pdf.pages:
            for font in page.Resources.Font.values():
                font.ToUnicode = pdf.make_stream(cmap.encode())

    return edit_pdf(data, edit)


def picture_of(
    lines: Sequence[str], *, size: tuple[int, int] = (1000, 500), font_size: int = 26, ink: str = "black"
) -> Image.Image:
    """Lines of text as a scanner would see them."""
    picture = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(picture)
    font = ImageFont.load_default(font_size)
    for index, line in enumerate(lines):
        draw.text((40, 40 + index * font_size * 1.6), line, font=font, fill=ink)
    return picture


def write(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def save(folder: Path, name: str, picture: Image.Image, **options: Any) -> Path:
    path = folder / name
    picture.save(path, **options)
    return path
