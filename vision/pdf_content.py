"""What a PDF page is made of: where its pictures are, and which of its text cannot be seen."""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pypdfium2.raw as pdfium

from mmserve.errors import DocumentError
from mmserve.vision.pdf import PdfPage
from mmserve.vision.reading_order import Line

Box = tuple[float, float, float, float]
Matrix = npt.NDArray[np.float64]
_MAX_OBJECTS = 20_000
_MAX_DEPTH = 6
_MAX_COVERS = 200
_NEARLY_WHITE = 225
_NEARLY_CLEAR = 25
_TINY_POINTS = 1.5
_INVISIBLE_MODES = (pdfium.FPDF_TEXTRENDERMODE_INVISIBLE, pdfium.FPDF_TEXTRENDERMODE_CLIP)
_GRID = 40
_CHECK_DPI = 100
_CHECK_PIXELS = 2_000_000
_INK_CONTRAST = 40


@dataclass(frozen=True)
class TextObject:
    raw: Any
    box: Box
    is_suspect: bool
    is_invisible_mode: bool
    is_tiny: bool


@dataclass(frozen=True)
class PageContent:
    """Boxes are left, top, right, bottom in points of the view."""

    texts: tuple[TextObject, ...]
    images: tuple[Box, ...]


@dataclass(frozen=True)
class HiddenText:
    """What was switched off because no reader sees it, and the text that an earlier OCR laid over a scan."""

    num_hidden_characters: int = 0
    scan_layer: tuple[Line, ...] = ()


def inspect(page: PdfPage, *, max_image_pixels: int) -> PageContent:
    """Raises `DocumentError` (`page_too_large`) for an embedded picture that would decode to more."""
    texts: list[TextObject] = []
    images: list[Box] = []
    covers: list[tuple[int, Box]] = []
    for raw, kind, matrix in _walk(page.raw, None, 0, [_MAX_OBJECTS]):
        box = _view_box(page, raw, matrix)
        if kind == pdfium.FPDF_PAGEOBJ_TEXT:
            texts.append(_text_object(raw, box))
        elif kind == pdfium.FPDF_PAGEOBJ_IMAGE:
            _check_image(raw, max_image_pixels)
            images.append(box)
            covers.append((len(texts), box))
        elif kind == pdfium.FPDF_PAGEOBJ_PATH and texts and len(covers) < _MAX_COVERS and _is_filled(raw):
            covers.append((len(texts), box))
    return PageContent(tuple(_mark_covered(texts, covers)), tuple(images))


def leave_out_hidden(page: PdfPage, content: PageContent) -> HiddenText:
    """Switch off the text that leaves no trace on the picture of the page; its absence is the proof.

    Text that was laid invisibly over a scan stays on, where there is ink under it.
    """
    suspects = [text for text in content.texts if text.is_suspect]
    if not suspects:
        return HiddenText()
    # pdfium gives the strings of objects only while they are on
    strings = {id(text): _object_text(page.textpage, text.raw) for text in suspects}
    scale = page.scale_for(_CHECK_DPI, _CHECK_PIXELS)
    before = page.render(scale)
    _activate(page, suspects, False)
    after = page.render(scale)
    tiny_is_usual = all(text.is_tiny for text in content.texts)
    hidden: list[TextObject] = []
    layer: list[TextObject] = []
    for text in suspects:
        region = _region(text.box, scale)
        leaves_trace = bool((before[region] != after[region]).any())
        if leaves_trace and (tiny_is_usual or not text.is_tiny):
            continue
        over_scan = not leaves_trace and any(_covers(image, text.box) for image in content.images)
        (layer if over_scan and _has_contrast(before[region]) else hidden).append(text)
    _activate(page, [text for text in suspects if text not in hidden], True)
    num_hidden = sum(len(strings[id(text)].strip()) for text in hidden)
    return HiddenText(num_hidden, tuple(Line(strings[id(text)].strip(), *text.box) for text in layer))


def uncovered_image_share(page: PdfPage, images: tuple[Box, ...], runs: list[Line]) -> float:
    """The share of the page that is picture with no text on it, counted in cells of a coarse grid."""
    grid = np.zeros((_GRID, _GRID), dtype=np.bool_)
    for box in images:
        grid[_cells(page, box)] = True
    for run in runs:
        grid[_cells(page, (run.left, run.top, run.right, run.bottom), margin=1)] = False
    return float(grid.mean())


def _cell_of(page: PdfPage, x: float, y: float) -> tuple[int, int]:
    row, column = int(y / max(page.height, 1e-6) * _GRID), int(x / max(page.width, 1e-6) * _GRID)
    return min(max(row, 0), _GRID - 1), min(max(column, 0), _GRID - 1)


def _cells(page: PdfPage, box: Box, margin: int = 0) -> tuple[slice, slice]:
    top, left = _cell_of(page, box[0], box[1])
    bottom, right = _cell_of(page, box[2], box[3])
    return slice(max(top - margin, 0), bottom + 1 + margin), slice(max(left - margin, 0), right + 1 + margin)


def _walk(
    container: Any, matrix: Matrix | None, depth: int, budget: list[int]
) -> Iterator[tuple[Any, int, Matrix | None]]:
    """Objects in drawing order, with the matrix of the form that they are in (None on the page itself)."""
    count, get = (
        (pdfium.FPDFFormObj_CountObjects, pdfium.FPDFFormObj_GetObject)
        if depth
        else (pdfium.FPDFPage_CountObjects, pdfium.FPDFPage_GetObject)
    )
    for index in range(count(container)):
        budget[0] -= 1
        if budget[0] < 0:
            return
        raw = get(container, index)
        kind = pdfium.FPDFPageObj_GetType(raw)
        if kind == pdfium.FPDF_PAGEOBJ_FORM and depth < _MAX_DEPTH:
            own = _matrix(raw)
            yield from _walk(raw, own if matrix is None else own @ matrix, depth + 1, budget)
        else:
            yield raw, kind, matrix


def _matrix(raw: Any) -> Matrix:
    values = pdfium.FS_MATRIX()
    if not pdfium.FPDFPageObj_GetMatrix(raw, values):
        return np.eye(3)
    return np.array([[values.a, values.b, 0], [values.c, values.d, 0], [values.e, values.f, 1]], dtype=np.float64)


def _view_box(page: PdfPage, raw: Any, matrix: Matrix | None) -> Box:
    left, bottom, right, top = (ctypes.c_float() for _ in range(4))
    if not pdfium.FPDFPageObj_GetBounds(raw, left, bottom, right, top):
        return (0.0, 0.0, 0.0, 0.0)
    x0, y0, x1, y1 = left.value, bottom.value, right.value, top.value
    if matrix is None:
        return page.view_box(x0, y0, x1, y1)
    corners = np.array([[x0, y0, 1], [x1, y0, 1], [x0, y1, 1], [x1, y1, 1]]) @ matrix
    low, high = corners.min(axis=0), corners.max(axis=0)
    return page.view_box(float(low[0]), float(low[1]), float(high[0]), float(high[1]))


def _text_object(raw: Any, box: Box) -> TextObject:
    mode = pdfium.FPDFTextObj_GetTextRenderMode(raw)
    red, green, blue, alpha = (ctypes.c_uint() for _ in range(4))
    has_color = pdfium.FPDFPageObj_GetFillColor(raw, red, green, blue, alpha)
    lightest = min(red.value, green.value, blue.value)
    is_pale = bool(has_color) and (lightest >= _NEARLY_WHITE or alpha.value <= _NEARLY_CLEAR)
    is_tiny = min(box[3] - box[1], box[2] - box[0]) > 0 and _font_height(raw, box) < _TINY_POINTS
    is_invisible = mode in _INVISIBLE_MODES
    return TextObject(raw, box, is_invisible or is_pale or is_tiny, is_invisible, is_tiny)


def _font_height(raw: Any, box: Box) -> float:
    """The smaller side of a text's box: its height, whichever way it runs; a lone point or dash is told by its font."""
    size = ctypes.c_float()
    pdfium.FPDFTextObj_GetFontSize(raw, size)
    matrix = _matrix(raw)
    return float(max(size.value * np.hypot(matrix[1, 0], matrix[1, 1]), min(box[3] - box[1], box[2] - box[0])))


def _mark_covered(texts: list[TextObject], covers: list[tuple[int, Box]]) -> list[TextObject]:
    """Text under something that was painted later (a black bar, a picture) is suspect too."""
    if not texts or not covers:
        return texts
    boxes = np.array([text.box for text in texts])
    covered = np.zeros(len(texts), dtype=np.bool_)
    for num_before, (left, top, right, bottom) in covers:
        earlier = boxes[:num_before]
        centers_x, centers_y = earlier[:, [0, 2]].mean(axis=1), earlier[:, [1, 3]].mean(axis=1)
        covered[:num_before] |= (left <= centers_x) & (centers_x <= right) & (top <= centers_y) & (centers_y <= bottom)
    return [
        TextObject(text.raw, text.box, text.is_suspect or bool(under), text.is_invisible_mode, text.is_tiny)
        for text, under in zip(texts, covered, strict=True)
    ]


def _is_filled(raw: Any) -> bool:
    fill, stroke = ctypes.c_int(), ctypes.c_int()
    return bool(pdfium.FPDFPath_GetDrawMode(raw, fill, stroke)) and fill.value != pdfium.FPDF_FILLMODE_NONE


def _check_image(raw: Any, max_image_pixels: int) -> None:
    width, height = ctypes.c_uint(), ctypes.c_uint()
    if not pdfium.FPDFImageObj_GetImagePixelSize(raw, width, height):
        return
    if width.value * height.value > max_image_pixels:
        raise DocumentError(
            "page_too_large", f"the page holds a picture of {width.value} x {height.value} pixels: scale it down"
        )


def _activate(page: PdfPage, texts: list[TextObject], active: bool) -> None:
    for text in texts:
        pdfium.FPDFPageObj_SetIsActive(text.raw, active)
    page.forget_text()


def _object_text(textpage: Any, raw: Any) -> str:
    size = pdfium.FPDFTextObj_GetText(raw, textpage, None, 0)
    buffer = (ctypes.c_ushort * max(size // 2, 1))()
    pdfium.FPDFTextObj_GetText(raw, textpage, buffer, size)
    return bytes(buffer).decode("utf-16-le", "ignore").rstrip("\x00")


def _region(box: Box, scale: float) -> tuple[slice, slice]:
    left, top, right, bottom = (max(0, round(side * scale)) for side in box)
    return slice(top, max(bottom, top + 1)), slice(left, max(right, left + 1))


def _covers(image: Box, box: Box) -> bool:
    x, y = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
    return image[0] <= x <= image[2] and image[1] <= y <= image[3]


def _has_contrast(pixels: npt.NDArray[np.uint8]) -> bool:
    return pixels.size > 0 and int(pixels.max()) - int(pixels.min()) > _INK_CONTRAST
