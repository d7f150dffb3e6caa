"""What a text layer says, held against what the page shows: lines are read again from its picture."""

import difflib
from collections.abc import Sequence
from dataclasses import replace

from mmserve.vision.image import RGB
from mmserve.vision.ocr import OcrEngine
from mmserve.vision.pdf import PdfPage
from mmserve.vision.pdf_lines import UNKNOWN, lines_of
from mmserve.vision.reading_order import Line

_NUM_SAMPLES = 4
_MIN_AGREEMENT = 0.5
# An earlier OCR errs in single letters; a line that was slipped in shares next to none.
_MIN_AGREEMENT_OF_EACH = 0.35
_MIN_LIKENESS = 0.7
_MAX_MENDED = 200


def agrees(lines: Sequence[Line], page: PdfPage, pixels: RGB, engine: OcrEngine) -> bool:
    """Whether the longest of `lines`, read again from the page's pixels, say the same."""
    samples = sorted(lines, key=lambda line: -len(line.text))[:_NUM_SAMPLES]
    found = [_likeness(line.text, _read(line, page, pixels, engine)) for line in samples]
    return sum(found) >= _MIN_AGREEMENT * len(found) and min(found) >= _MIN_AGREEMENT_OF_EACH


def mended_lines(page: PdfPage, pixels: RGB, engine: OcrEngine) -> tuple[list[Line], int]:
    """The page's lines as `lines_of` gives them; one that lacks letters as the picture has it, if that is alike."""
    lines, turns = lines_of(page.characters())
    broken = [index for index, line in enumerate(lines) if UNKNOWN in line.text][:_MAX_MENDED]
    for index in [] if turns else broken:
        read = _read(lines[index], page, pixels, engine)
        if read is not None and _likeness(lines[index].text, read) >= _MIN_LIKENESS:
            lines[index] = replace(lines[index], text=read)
    return lines, turns


def _read(line: Line, page: PdfPage, pixels: RGB, engine: OcrEngine) -> str | None:
    """None where the line is too small to be read."""
    scale = pixels.shape[1] / max(page.width, 1e-6)
    margin = 0.15 * line.height
    top, bottom = max(0, int((line.top - margin) * scale)), int((line.bottom + margin) * scale) + 1
    left, right = max(0, int((line.left - margin) * scale)), int((line.right + margin) * scale) + 1
    crop = pixels[top:bottom, left:right]
    return None if min(crop.shape[:2]) < 4 else engine.read_line(crop)


def _likeness(text: str, read: str | None) -> float:
    if read is None:
        return 1.0
    return difflib.SequenceMatcher(None, _letters(text), _letters(read), autojunk=False).ratio()


def _letters(text: str) -> str:
    return "".join(character for character in text.casefold() if character.isalnum())
