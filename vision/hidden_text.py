"""Text of a PDF page that no reader sees, told by the picture of the page: what leaves no trace on it is not there."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pypdfium2.raw as pdfium

from mmserve.vision.pdf import PdfPage
from mmserve.vision.pdf_content import Box, PageContent, TextObject
from mmserve.vision.reading_order import Line

_CHECK_DPI = 100
_CHECK_PIXELS = 2_000_000
_INK_CONTRAST = 40
# of 255; print of a quarter's grey on white leaves more at 100 dpi, even where it is thin
_TRACE = 16


@dataclass(frozen=True)
class HiddenText:
    """What was switched off because no reader sees it.

    `scan_layer` is the text that an earlier OCR laid over a scan, `replaced` what stands for other glyphs than it says:
    both have to be compared with what the page shows.
    """

    num_hidden_characters: int = 0
    scan_layer: tuple[Line, ...] = ()
    replaced: tuple[Line, ...] = ()


def leave_out_hidden(page: PdfPage, content: PageContent) -> HiddenText:
    """Switch off the text whose absence does not change the picture of the page.

    Text that was laid invisibly over a scan stays on, where there is ink under it.
    """
    replaced = tuple(_line(page, text) for text in content.texts if text.is_replaced)
    doubted = [[text for text in content.texts if text.doubt == doubt] for doubt in ("strong", "some")]
    if not any(doubted):
        return HiddenText(replaced=replaced)
    # pdfium gives the strings of objects only while they are on
    lines = {id(text): _line(page, text) for group in doubted for text in group}
    scale = page.scale_for(_CHECK_DPI, _CHECK_PIXELS)
    usual_is_tiny = all(text.is_tiny for text in content.texts)
    shown = page.render(scale)
    hidden: list[TextObject] = []
    layer: list[TextObject] = []
    # What is strongly doubted goes first: it may stand in the same place as what is seen.
    for group in filter(None, doubted):
        _activate(page, group, False)
        changed = _difference(shown, page.render(scale))
        for text in group:
            region = _region(text.box, scale)
            leaves_trace = changed[region].size > 0 and int(changed[region].max()) > _TRACE
            if leaves_trace and (usual_is_tiny or not text.is_tiny):
                continue
            over_scan = not leaves_trace and any(_covers(image, text.box) for image in content.images)
            (layer if over_scan and _has_contrast(shown[region]) else hidden).append(text)
        _activate(page, group, True)
    _activate(page, hidden, False)
    num_hidden = sum(len(lines[id(text)].text) for text in hidden)
    return HiddenText(num_hidden, tuple(lines[id(text)] for text in layer), replaced)


def _difference(before: npt.NDArray[np.uint8], after: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """`[height, width, 3]`, how much each value has changed."""
    return np.maximum(before, after) - np.minimum(before, after)


def _activate(page: PdfPage, texts: Sequence[TextObject], active: bool) -> None:
    for text in texts:
        pdfium.FPDFPageObj_SetIsActive(text.raw, active)
    page.forget_text()


def _line(page: PdfPage, text: TextObject) -> Line:
    return Line(_object_text(page.textpage, text.raw).strip(), *text.box)


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
