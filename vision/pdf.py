"""One PDF file through pdfium. pdfium is not thread-safe: use it in a process that does nothing else at that moment."""

import ctypes
import math
from pathlib import Path
from typing import Any

import numpy as np
import pypdfium2
import pypdfium2.raw as pdfium

from mmserve.errors import DocumentError
from mmserve.vision.image import RGB
from mmserve.vision.page_types import PageLimits
from mmserve.vision.pdf_lines import GENERATED, UNKNOWN, PlacedCharacter
from mmserve.vision.reading_order import Line
from mmserve.vision.sniff import HEAD_BYTES, pdf_offset

_TAIL_BYTES = 64 * 1024
_HEADER_WINDOW = 1024
_WRONG_PASSWORD, _UNKNOWN_ENCRYPTION = 4, 5
_DRAWN_ANNOTATIONS = (pdfium.FPDF_ANNOT_WIDGET, pdfium.FPDF_ANNOT_FREETEXT, pdfium.FPDF_ANNOT_STAMP)
_MAX_ANNOTATIONS = 2000
# pdfium maps to whole device pixels: a hundred to the point, measured over 100 points
_UNITS, _SPAN = 100, 100.0
_UNICODE_SAMPLES = 100
_BOLD_WEIGHT = 600
_MAX_NAME_CHARACTERS = 255
# pdfium leaves NUL out of bounded text
_NUL_IN_RANGE = "\ufffe"


class PdfFile:
    """An open PDF. Page numbers are 1-based."""

    def __init__(self, path: Path, name: str, limits: PageLimits) -> None:
        """Raises `DocumentError`: `password_required`, `corrupt_document`, `too_many_pages`."""
        self._name = name
        check_complete(path, name)
        try:
            self._pdf = pypdfium2.PdfDocument(_pdfium_input(path))
        except pypdfium2.PdfiumError as error:
            raise self._open_error(error) from None
        self.num_pages = len(self._pdf)
        if self.num_pages > limits.max_pages:
            self.close()
            raise DocumentError(
                "too_many_pages", f"{name} has {self.num_pages} pages; at most {limits.max_pages} are read"
            )
        self._pdf.init_forms()

    def _open_error(self, error: pypdfium2.PdfiumError) -> DocumentError:
        if error.err_code == _WRONG_PASSWORD:
            return DocumentError("password_required", f"{self._name} is locked by a password: give an unlocked copy")
        if error.err_code == _UNKNOWN_ENCRYPTION:
            return DocumentError(
                "password_required",
                f"{self._name} is locked by a certificate or the like: give an unlocked copy",
            )
        return DocumentError("corrupt_document", f"{self._name} is damaged: it cannot be opened as a PDF")

    def attachments(self) -> tuple[str, ...]:
        """Names of embedded files. They are told to the user and never written."""
        count = min(pdfium.FPDFDoc_GetAttachmentCount(self._pdf), 1000)
        names = (_attachment_name(pdfium.FPDFDoc_GetAttachment(self._pdf, index)) for index in range(count))
        return tuple(shown_name(name) for name in names if name is not None)

    def page(self, number: int) -> "PdfPage":
        """Raises `DocumentError` (`corrupt_document`) for a page that cannot be loaded."""
        try:
            raw_page = self._pdf[number - 1]
            if _draw_annotations(raw_page):
                raw_page.close()
                raw_page = self._pdf[number - 1]
        except pypdfium2.PdfiumError:
            raise DocumentError("corrupt_document", f"page {number} of {self._name} is damaged") from None
        if min(raw_page.get_width(), raw_page.get_height()) <= 0:
            raw_page.close()
            raise DocumentError("corrupt_document", f"page {number} of {self._name} has no area")
        return PdfPage(raw_page)

    def close(self) -> None:
        self._pdf.close()


class PdfPage:
    """A loaded page: its size as a reader sees it (points, `/Rotate` applied), text with places, pixels."""

    def __init__(self, page: Any) -> None:
        self.raw = page
        self.width: float = page.get_width()
        self.height: float = page.get_height()
        self._to_view = _view_transform(page, self.width, self.height)
        self._textpage: Any = None

    def __enter__(self) -> "PdfPage":
        return self

    def __exit__(self, *_: object) -> None:
        self.raw.close()

    @property
    def is_turned(self) -> bool:
        """Whether `/Rotate` lays the page on its side."""
        return bool(self.raw.get_rotation() % 180)

    @property
    def textpage(self) -> Any:
        """pdfium's reading of the text layer, kept until `forget_text`."""
        if self._textpage is None:
            self._textpage = self.raw.get_textpage()
        return self._textpage

    def forget_text(self) -> None:
        """To be called when objects were switched on or off."""
        if self._textpage is not None:
            self._textpage.close()
            self._textpage = None

    def text(self) -> str:
        """The text layer inside the page's box, in the order of the content stream."""
        return str(self.textpage.get_text_bounded())

    def runs(self) -> list[Line]:
        """Places of the runs of text, without their text: much cheaper than `characters`."""
        rects = [self.textpage.get_rect(index) for index in range(self.textpage.count_rects())]
        return [Line("", *self.view_box(*rect)) for rect in rects]

    def characters(self) -> list[PlacedCharacter]:
        """Characters inside the page's box, in the order of the content stream; much dearer than `text`."""
        placed = [self._place(self.textpage, index) for index in range(self.textpage.count_chars())]
        return [one for one in placed if one.box is None or self._is_inside(one.box)]

    def _place(self, textpage: Any, index: int) -> PlacedCharacter:
        code = pdfium.FPDFText_GetUnicode(textpage, index)
        character = UNKNOWN if code == 0 else chr(code) if code < 0x110000 and not 0xD800 <= code < 0xE000 else ""
        rect = pdfium.FS_RECTF()
        if character in GENERATED or not pdfium.FPDFText_GetLooseCharBox(textpage, index, rect):
            return PlacedCharacter(character, None)
        is_bold = pdfium.FPDFText_GetFontWeight(textpage, index) >= _BOLD_WEIGHT
        return PlacedCharacter(character, self.view_box(rect.left, rect.bottom, rect.right, rect.top), is_bold)

    def _is_inside(self, box: tuple[float, float, float, float]) -> bool:
        x, y = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
        return -1 <= x <= self.width + 1 and -1 <= y <= self.height + 1

    def has_unknown_letters(self) -> bool:
        """Whether the character map has nothing, or NUL, for some: often ligatures, within words that read well."""
        text = self.textpage.get_text_range()
        if UNKNOWN in text or _NUL_IN_RANGE not in text:
            return UNKNOWN in text
        # A hyphen at a line's end may look like that, too.
        count = self.textpage.count_chars()
        return any(pdfium.FPDFText_GetUnicode(self.textpage, index) == 0 for index in range(count))

    def attachments(self) -> tuple[str, ...]:
        """Names of the files that are pinned to the page."""
        count = min(pdfium.FPDFPage_GetAnnotCount(self.raw), _MAX_ANNOTATIONS)
        names = (_attached_name(self.raw, index) for index in range(count))
        return tuple(shown_name(name) for name in names if name is not None)

    def has_unmapped_text(self) -> bool:
        """Whether pdfium itself found no Unicode for a tenth of the characters."""
        count = self.textpage.count_chars()
        sample = range(0, count, max(1, count // _UNICODE_SAMPLES))
        errors = sum(pdfium.FPDFText_HasUnicodeMapError(self.textpage, index) == 1 for index in sample)
        return bool(errors > 0.1 * len(sample))

    def view_box(self, left: float, bottom: float, right: float, top: float) -> tuple[float, float, float, float]:
        """A box in the page's own coordinates -> left, top, right, bottom in the view."""
        a, b, c, d, e, f = self._to_view
        xs = a * left + c * bottom + e, a * right + c * top + e
        ys = b * left + d * bottom + f, b * right + d * top + f
        return min(xs), min(ys), max(xs), max(ys)

    def scale_for(self, dpi: float, max_pixels: int) -> float:
        """Pixels per point at `dpi`, less where the page would have more than `max_pixels`."""
        area = max(self.width, 1.0) * max(self.height, 1.0)
        return min(dpi / 72, math.sqrt(max_pixels / area))

    def render(self, scale: float) -> RGB:
        """RGB [height, width, 3], form fields drawn, on white."""
        bitmap = self.raw.render(scale=scale, rev_byteorder=True, limit_image_cache=True)
        try:
            return np.array(bitmap.to_numpy()[:, :, :3])
        finally:
            bitmap.close()


def shown_name(name: str) -> str:
    """A name that a document gives, as it can be shown: printable and of bounded length."""
    printable = "".join(character for character in name if character.isprintable())
    return printable[:_MAX_NAME_CHARACTERS] or "a file without a name"


def check_complete(path: Path, name: str) -> None:
    """A truncated file still opens, with pages missing or empty; its end tells.

    Raises `DocumentError` (`corrupt_document`).
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
        file.seek(max(0, size - _TAIL_BYTES))
        tail = file.read()
    last = max(tail.rfind(b"%%EOF"), tail.rfind(b"startxref"))
    if last < 0 or b" obj" in tail[last:] or _linearized_length(head) > size:
        raise DocumentError("corrupt_document", f"{name} is cut off: its end is missing. Send the whole file")


def _linearized_length(head: bytes) -> int:
    """The file length that a linearized PDF states in its first object, 0 where it states none."""
    start = head.find(b"/Linearized")
    position = head.find(b"/L ", start) if start >= 0 else -1
    digits = head[position + 3 : position + 16].split()[:1] if position >= 0 else []
    return int(digits[0]) if digits and digits[0].isdigit() else 0


def _pdfium_input(path: Path) -> Path | bytes:
    """pdfium looks for the header in the first 1,024 bytes; junk before a later one is dropped here."""
    with path.open("rb") as file:
        offset = pdf_offset(file.read(HEAD_BYTES))
    return path if offset < _HEADER_WINDOW else path.read_bytes()[offset:]


def _draw_annotations(page: Any) -> bool:
    """Make filled form fields and free text a part of the page (in memory), so that its text has them too."""
    count = min(pdfium.FPDFPage_GetAnnotCount(page), _MAX_ANNOTATIONS)
    if not any(_annotation_subtype(page, index) in _DRAWN_ANNOTATIONS for index in range(count)):
        return False
    # Not by pypdfium2's own method, which refuses pages of documents without a form.
    return bool(pdfium.FPDFPage_Flatten(page, pdfium.FLAT_NORMALDISPLAY) == pdfium.FLATTEN_SUCCESS)


def _annotation_subtype(page: Any, index: int) -> int:
    annotation = pdfium.FPDFPage_GetAnnot(page, index)
    try:
        return int(pdfium.FPDFAnnot_GetSubtype(annotation))
    finally:
        pdfium.FPDFPage_CloseAnnot(annotation)


def _attached_name(page: Any, index: int) -> str | None:
    annotation = pdfium.FPDFPage_GetAnnot(page, index)
    try:
        return _attachment_name(pdfium.FPDFAnnot_GetFileAttachment(annotation))
    finally:
        pdfium.FPDFPage_CloseAnnot(annotation)


def _attachment_name(attachment: Any) -> str | None:
    """None for an entry in which there is no file."""
    if not attachment:
        return None
    size = pdfium.FPDFAttachment_GetName(attachment, None, 0)
    buffer = (ctypes.c_ushort * max(size // 2, 1))()
    pdfium.FPDFAttachment_GetName(attachment, buffer, size)
    return bytes(buffer).decode("utf-16-le", "ignore").rstrip("\x00")


def _view_transform(page: Any, width: float, height: float) -> tuple[float, float, float, float, float, float]:
    """(a, b, c, d, e, f): the page's (x, y) is (a x + c y + e, b x + d y + f) in the view, y down."""
    size = math.ceil(width * _UNITS), math.ceil(height * _UNITS)

    def to_view(x: float, y: float) -> tuple[float, float]:
        device_x, device_y = ctypes.c_int(), ctypes.c_int()
        pdfium.FPDF_PageToDevice(page, 0, 0, *size, 0, x, y, device_x, device_y)
        return device_x.value / _UNITS, device_y.value / _UNITS

    (e, f), (right_x, right_y), (up_x, up_y) = to_view(0, 0), to_view(_SPAN, 0), to_view(0, _SPAN)
    return (right_x - e) / _SPAN, (right_y - f) / _SPAN, (up_x - e) / _SPAN, (up_y - f) / _SPAN, e, f
