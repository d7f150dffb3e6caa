"""One page -> its text, from the text layer where that can be trusted, else by OCR. Decided page by page."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mmserve.vision import ink
from mmserve.vision.hidden_text import HiddenText, leave_out_hidden
from mmserve.vision.image import RGB, ImageFile
from mmserve.vision.layer_checks import agrees, mended_lines
from mmserve.vision.ocr import OcrEngine, OcrText
from mmserve.vision.page_markdown import markdown_of
from mmserve.vision.page_types import Page, PageForm, PageLimits
from mmserve.vision.pdf import PdfPage
from mmserve.vision.pdf_content import PageContent, inspect, uncovered_image_share
from mmserve.vision.pdf_lines import lines_of
from mmserve.vision.reading_order import (
    Line,
    are_mostly_upright_strips,
    quarter_turned,
    share_of_backward_steps,
    text_of,
)
from mmserve.vision.text_cleaning import clean_page_text
from mmserve.vision.text_quality import is_doubtful, is_trustworthy

OCR_PIXELS = 6_000_000
_BLANK_DPI = 100
_MAX_BACKWARD_SHARE = 0.3
_LITTLE_TEXT = 25
_BARE_IMAGE_SHARE = 0.12
_NEARLY_BLANK = 0.002
_RUN_MARGIN = 3.0
_CELL_GAP = 0.75
# an embedded picture may have more pixels than a page is rendered with: large-format scans in black and white do
_EMBEDDED_PIXELS_FACTOR = 4

NOTE_HIDDEN = "{} characters of text that cannot be seen on the page were left out."
NOTE_LAYER_CONTRADICTS = "The invisible text over the scan does not say what the scan shows; the scan was read."
NOTE_REPLACED_TEXT = "Text that stands for other glyphs does not say what the page shows; the page was read by OCR."
NOTE_CUT_OFF = "A picture on the page is cut off: its data ends early."
NOTE_ATTACHED = "Attached to the page and not read: {}."
NOTE_UNKNOWN_LETTERS = "The text layer lacks some letters, and OCR is off or not installed."
NOTE_MENDED = "Lines that lack letters in the text layer were read by OCR."
NOTE_UNREADABLE_LAYER = "The text layer is garbled (a wrong character map)"
NOTE_PARTLY_OCR = "Pictures on the page were read by OCR."
NOTE_NO_OCR = "The page is a picture, and OCR is off or not installed."
NOTE_NOTHING_READ = "No text was found in the picture."
NOTE_UNSURE = "OCR is unsure of this page."
NOTE_TURNED = "The page was turned upright for reading."


class OcrNeeded(Exception):
    """A page whose text takes OCR, where none was given yet."""


@dataclass(frozen=True)
class OcrAccess:
    """`engine` gives the loaded engine, raises `OcrNeeded` to have the page come back later, or is None for no OCR."""

    engine: Callable[[], OcrEngine] | None
    form: PageForm = "text"

    def laid_out(self, page: Page, lines: Callable[[], Sequence[Line]]) -> Page:
        """The page, with its Markdown where that is wanted."""
        return replace(page, markdown=markdown_of(lines())) if self.form == "markdown" else page

    def missed(self, page: Page, note: str) -> Page:
        """The page, with a note on what took OCR where it was wanted."""
        return page if self.form == "picture" else replace(page, notes=(*page.notes, note))


def read_image_page(image: ImageFile, number: int, ocr: OcrAccess) -> Page:
    """Raises `DocumentError` for a picture that is not whole, and what `ocr` raises."""
    width, height = image.size(number)
    page = Page(number, width=float(width), height=float(height), notes=image.notes)
    if ocr.engine is not None:
        ocr.engine()
    pixels = image.pixels(number, OCR_PIXELS)
    return _read_picture(page, pixels, ocr)


def read_pdf_page(page: PdfPage, number: int, *, ocr: OcrAccess, render: Callable[[], RGB], limits: PageLimits) -> Page:
    """`render` gives the page's pixels for OCR. Raises `DocumentError`, and what `ocr` raises."""
    content = inspect(page, max_image_pixels=_EMBEDDED_PIXELS_FACTOR * limits.max_pixels)
    hidden = leave_out_hidden(page, content)
    found = Page(number, width=page.width, height=page.height, notes=_content_notes(page, content, hidden))
    text = _layer_text(page)
    if not text.strip():
        return _read_textless(page, found, render, ocr)
    if not is_trustworthy(text) or page.has_unmapped_text():
        return _read_garbled(found, render, ocr)
    if is_doubtful(text) and ocr.engine is not None and not agrees(_own_lines(page), page, render(), ocr.engine()):
        return _read_garbled(found, render, ocr)
    for lines, note in ((hidden.scan_layer, NOTE_LAYER_CONTRADICTS), (hidden.replaced, NOTE_REPLACED_TEXT)):
        if lines and ocr.engine is not None and not agrees(lines, page, render(), ocr.engine()):
            return _read_picture(replace(found, notes=(*found.notes, note)), render(), ocr)
    found = _with_letters(replace(found, text=text, source="text_layer"), page, render, ocr)
    if hidden.scan_layer:
        return found
    return _add_pictures(page, content, found, render, ocr)


def _content_notes(page: PdfPage, content: PageContent, hidden: HiddenText) -> tuple[str, ...]:
    notes = []
    if hidden.num_hidden_characters:
        notes.append(NOTE_HIDDEN.format(hidden.num_hidden_characters))
    if content.has_cut_off_image:
        notes.append(NOTE_CUT_OFF)
    if attachments := page.attachments():
        notes.append(NOTE_ATTACHED.format(", ".join(attachments)))
    return tuple(notes)


def _with_letters(found: Page, page: PdfPage, render: Callable[[], RGB], ocr: OcrAccess) -> Page:
    """Lines with letters that the text layer does not know are read from the picture."""
    if not page.has_unknown_letters():
        return ocr.laid_out(found, lambda: _layer_lines(page))
    if ocr.engine is None:
        return ocr.laid_out(ocr.missed(found, NOTE_UNKNOWN_LETTERS), lambda: _layer_lines(page))
    lines, turns = mended_lines(page, render(), ocr.engine())
    upright = [quarter_turned(line, turns) for line in lines]
    found = replace(found, text=clean_page_text(text_of(upright)), notes=(*found.notes, NOTE_MENDED))
    return ocr.laid_out(found, lambda: upright)


def _layer_text(page: PdfPage) -> str:
    """The text layer, put into reading order where the content stream is not."""
    runs = page.runs()
    is_sane = share_of_backward_steps(runs) <= _MAX_BACKWARD_SHARE and not are_mostly_upright_strips(runs)
    if is_sane and not page.is_turned:
        return clean_page_text(page.text())
    lines, turns = lines_of(page.characters())
    return clean_page_text(text_of([quarter_turned(line, turns) for line in lines]))


def _layer_lines(page: PdfPage) -> list[Line]:
    """Lines of the text layer, upright; cells of a table are lines of their own."""
    lines, turns = lines_of(page.characters(), cell_gap=_CELL_GAP)
    return [quarter_turned(replace(line, text=clean_page_text(line.text)), turns) for line in lines]


def _read_textless(page: PdfPage, found: Page, render: Callable[[], RGB], ocr: OcrAccess) -> Page:
    preview = page.render(page.scale_for(_BLANK_DPI, OCR_PIXELS))
    if ink.ink_share(preview) == 0.0:
        return replace(found, is_blank=True)
    if ocr.engine is None:
        return ocr.missed(found, NOTE_NO_OCR)
    ocr.engine()
    return _read_picture(found, render(), ocr)


def _read_garbled(found: Page, render: Callable[[], RGB], ocr: OcrAccess) -> Page:
    if ocr.engine is None:
        return ocr.missed(found, f"{NOTE_UNREADABLE_LAYER}, and OCR is off or not installed.")
    ocr.engine()
    found = replace(found, notes=(*found.notes, f"{NOTE_UNREADABLE_LAYER}; the page was read by OCR."))
    return _read_picture(found, render(), ocr)


def _read_picture(found: Page, pixels: RGB, ocr: OcrAccess) -> Page:
    share = ink.ink_share(pixels)
    if share == 0.0:
        return replace(found, is_blank=True)
    if ocr.engine is None:
        return ocr.missed(found, NOTE_NO_OCR)
    result = ocr.engine().read(pixels)
    text = clean_page_text(text_of(result.lines))
    if not text.strip():
        is_blank = share < _NEARLY_BLANK
        return replace(found, is_blank=is_blank, notes=found.notes if is_blank else (*found.notes, NOTE_NOTHING_READ))
    found = replace(found, text=text, source="ocr", notes=(*found.notes, *_ocr_notes(result)))
    return ocr.laid_out(found, lambda: result.lines)


def _ocr_notes(result: OcrText) -> tuple[str, ...]:
    notes = (NOTE_TURNED,) if result.quarter_turns else ()
    return (*notes, NOTE_UNSURE) if result.confidence < 0.7 else notes


def _add_pictures(page: PdfPage, content: PageContent, found: Page, render: Callable[[], RGB], ocr: OcrAccess) -> Page:
    """Read what is a picture on a page that also has text: a scan under a digital header, a screenshot."""
    if ocr.engine is None or not _may_have_more(page, content, found):
        return found
    engine = ocr.engine()
    pixels = render()
    result = engine.read(pixels)
    scale = pixels.shape[1] / max(page.width, 1e-6)
    lines = [_to_points(line, scale) for line in result.lines] if not result.quarter_turns else []
    own = _own_lines(page)
    extra = [line for line in lines if not any(_overlap(line, other) for other in own)]
    if not extra:
        return found
    text = clean_page_text(text_of([*own, *extra]))
    num_extra = sum(len(line.text) for line in extra)
    source = found.source if num_extra < len(found.text) else "ocr"
    found = replace(found, text=text, source=source, notes=(*found.notes, NOTE_PARTLY_OCR))
    return ocr.laid_out(found, lambda: [*_layer_lines(page), *extra])


def _own_lines(page: PdfPage) -> list[Line]:
    return lines_of(page.characters())[0]


def _may_have_more(page: PdfPage, content: PageContent, found: Page) -> bool:
    if content.images and uncovered_image_share(page, content.images, page.runs()) >= _BARE_IMAGE_SHARE:
        return _other_ink_share(page) > _NEARLY_BLANK
    return len(found.text) < _LITTLE_TEXT and _other_ink_share(page) > 0.0


def _other_ink_share(page: PdfPage) -> float:
    """How much is drawn besides the text layer's own lines: text as outlines, say, or in a picture."""
    scale = page.scale_for(_BLANK_DPI, OCR_PIXELS)
    margin = _RUN_MARGIN
    own = [(run.left - margin, run.top - margin, run.right + margin, run.bottom + margin) for run in page.runs()]
    boxes = [(left * scale, top * scale, right * scale, bottom * scale) for left, top, right, bottom in own]
    return ink.ink_share(page.render(scale), boxes)


def _to_points(line: Line, scale: float) -> Line:
    return Line(line.text, line.left / scale, line.top / scale, line.right / scale, line.bottom / scale)


def _overlap(line: Line, other: Line) -> bool:
    width = min(line.right, other.right) - max(line.left, other.left)
    height = min(line.bottom, other.bottom) - max(line.top, other.top)
    return width > 0 and height > 0 and width * height > 0.3 * max(line.width * line.height, 1e-6)
