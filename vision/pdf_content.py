"""What a PDF page is made of: where its pictures are, and of which of its text it is in doubt whether it is seen."""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

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
_MAX_PAINTED = 200
_NEARLY_WHITE = 225
_PALE = 150
_NEARLY_CLEAR = 25
_TINY_POINTS = 1.5
_NARROW_SHARE = 0.1
_INVISIBLE_MODES = (pdfium.FPDF_TEXTRENDERMODE_INVISIBLE, pdfium.FPDF_TEXTRENDERMODE_CLIP)
_STROKE_MODES = (pdfium.FPDF_TEXTRENDERMODE_STROKE, pdfium.FPDF_TEXTRENDERMODE_STROKE_CLIP)
_OPTIONAL_CONTENT = "OC"
_MIN_REPLACEMENT_BYTES = 20
_END_OF_JPEG = b"\xff\xd9"
_TAIL_BYTES = 1024
_MAX_CHECKED_BYTES = 64 * 1024**2
_GRID = 40
# Whether a reader sees a text: surely as it seems, perhaps not (clipped, on a ground, in a layer), hardly.
Doubt = Literal["none", "some", "strong"]


@dataclass(frozen=True)
class TextObject:
    """`is_replaced`: what it says is not what its glyphs say, but an `/ActualText` beside them."""

    raw: Any
    box: Box
    doubt: Doubt
    is_tiny: bool
    is_replaced: bool


@dataclass(frozen=True)
class PageContent:
    """Boxes are left, top, right, bottom in points of the view."""

    texts: tuple[TextObject, ...]
    images: tuple[Box, ...]
    has_cut_off_image: bool = False


def inspect(page: PdfPage, *, max_image_pixels: int) -> PageContent:
    """Raises `DocumentError` (`page_too_large`) for an embedded picture that would decode to more."""
    texts: list[TextObject] = []
    images: list[Box] = []
    painted: list[Box] = []
    is_cut_off = False
    for raw, kind, matrix in _walk(page.raw, None, 0, [_MAX_OBJECTS]):
        box = _view_box(page, raw, matrix)
        if kind == pdfium.FPDF_PAGEOBJ_TEXT:
            texts.append(_text_object(raw, box, is_in_form=matrix is not None))
        elif kind == pdfium.FPDF_PAGEOBJ_IMAGE:
            _check_image(raw, max_image_pixels)
            is_cut_off = is_cut_off or _is_cut_off(raw)
            images.append(box)
            painted.append(box)
        elif kind == pdfium.FPDF_PAGEOBJ_SHADING or (kind == pdfium.FPDF_PAGEOBJ_PATH and _is_filled(raw)):
            painted.append(box)
    return PageContent(tuple(_doubt_where_painted(texts, painted)), tuple(images), is_cut_off)


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


def _text_object(raw: Any, box: Box, *, is_in_form: bool) -> TextObject:
    marks = _marks(raw)
    is_tiny = min(box[3] - box[1], box[2] - box[0]) > 0 and _is_tiny(raw, box)
    doubt = "strong" if is_tiny else _doubt_by_paint(raw)
    may_be_cut = is_in_form or _OPTIONAL_CONTENT in marks or _is_clipped(raw)
    is_replaced = any(length >= _MIN_REPLACEMENT_BYTES for length in marks.values())
    return TextObject(raw, box, "some" if doubt == "none" and may_be_cut else doubt, is_tiny, is_replaced)


def _doubt_by_paint(raw: Any) -> Doubt:
    mode = pdfium.FPDFTextObj_GetTextRenderMode(raw)
    if mode in _INVISIBLE_MODES:
        return "strong"
    get_color = pdfium.FPDFPageObj_GetStrokeColor if mode in _STROKE_MODES else pdfium.FPDFPageObj_GetFillColor
    red, green, blue, alpha = (ctypes.c_uint() for _ in range(4))
    if not get_color(raw, red, green, blue, alpha):
        return "some"
    darkest = min(red.value, green.value, blue.value)
    if darkest >= _NEARLY_WHITE or alpha.value <= _NEARLY_CLEAR:
        return "strong"
    return "some" if darkest > _PALE or alpha.value <= _PALE else "none"


def _is_tiny(raw: Any, box: Box) -> bool:
    """The smaller side of a text's box is its height, whichever way it runs; a lone point or dash is told by its font.

    Letters that are pressed together to a line are tiny, too.
    """
    size = ctypes.c_float()
    pdfium.FPDFTextObj_GetFontSize(raw, size)
    matrix = _matrix(raw)
    along, up = np.hypot(matrix[0, 0], matrix[0, 1]), np.hypot(matrix[1, 0], matrix[1, 1])
    height = max(size.value * up, min(box[3] - box[1], box[2] - box[0]))
    return bool(height < _TINY_POINTS or along < _NARROW_SHARE * up)


def _is_clipped(raw: Any) -> bool:
    return bool(pdfium.FPDFClipPath_CountPaths(pdfium.FPDFPageObj_GetClipPath(raw)) > 0)


def _marks(raw: Any) -> dict[str, int]:
    """The marks of content that an object stands in, and how many bytes of text each says instead of it."""
    marks: dict[str, int] = {}
    for index in range(max(0, pdfium.FPDFPageObj_CountMarks(raw))):
        mark = pdfium.FPDFPageObj_GetMark(raw, index)
        used = ctypes.c_ulong()
        buffer = (ctypes.c_ushort * 64)()
        pdfium.FPDFPageObjMark_GetName(mark, buffer, ctypes.sizeof(buffer), used)
        name = bytes(buffer)[: min(used.value, ctypes.sizeof(buffer))].decode("utf-16-le", "ignore").rstrip("\x00")
        length = ctypes.c_ulong()
        pdfium.FPDFPageObjMark_GetParamStringValue(mark, b"ActualText", None, 0, length)
        marks[name] = max(length.value, marks.get(name, 0))
    return marks


def _doubt_where_painted(texts: list[TextObject], painted: list[Box]) -> list[TextObject]:
    """Text under what was painted later (a black bar, a picture), or of the colour of what it stands on."""
    if not texts or not painted:
        return texts
    boxes = np.array([text.box for text in texts])
    centers_x, centers_y = boxes[:, [0, 2]].mean(axis=1), boxes[:, [1, 3]].mean(axis=1)
    touched = np.full(len(texts), len(painted) > _MAX_PAINTED)
    for left, top, right, bottom in painted[:_MAX_PAINTED]:
        touched |= (left <= centers_x) & (centers_x <= right) & (top <= centers_y) & (centers_y <= bottom)
    return [
        replace(text, doubt="some") if is_touched and text.doubt == "none" else text
        for text, is_touched in zip(texts, touched, strict=True)
    ]


def _is_filled(raw: Any) -> bool:
    fill, stroke = ctypes.c_int(), ctypes.c_int()
    return bool(pdfium.FPDFPath_GetDrawMode(raw, fill, stroke)) and fill.value != pdfium.FPDF_FILLMODE_NONE


def _is_cut_off(raw: Any) -> bool:
    """Whether a JPEG has no end. pdfium draws what there is of it, and the rest in grey."""
    name = ctypes.create_string_buffer(16)
    count = pdfium.FPDFImageObj_GetImageFilterCount(raw)
    if count != 1 or not pdfium.FPDFImageObj_GetImageFilter(raw, 0, name, 16) or name.value != b"DCTDecode":
        return False
    size = pdfium.FPDFImageObj_GetImageDataRaw(raw, None, 0)
    if not 0 < size <= _MAX_CHECKED_BYTES:
        return False
    data = ctypes.create_string_buffer(size)
    pdfium.FPDFImageObj_GetImageDataRaw(raw, data, size)
    return _END_OF_JPEG not in bytes(memoryview(data)[-_TAIL_BYTES:])


def _check_image(raw: Any, max_image_pixels: int) -> None:
    width, height = ctypes.c_uint(), ctypes.c_uint()
    if not pdfium.FPDFImageObj_GetImagePixelSize(raw, width, height):
        return
    if width.value * height.value > max_image_pixels:
        raise DocumentError(
            "page_too_large", f"the page holds a picture of {width.value} x {height.value} pixels: scale it down"
        )
