"""Plain text files: pages end at form feeds, as a printer would have it."""

import codecs
from pathlib import Path

from mmserve.errors import DocumentError
from mmserve.vision.page_types import Page
from mmserve.vision.text_cleaning import clean_plain_text

_BOMS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))


def read_text_pages(path: Path, name: str) -> list[str]:
    """The pages of a text file in UTF-8, or UTF-16 with a byte order mark.

    Raises `DocumentError`: `unsupported_type` where the bytes are no such text, `empty_document` for nothing but space.
    """
    data = path.read_bytes()
    bom, encoding = next(((b, e) for b, e in _BOMS if data.startswith(b)), (b"", "utf-8"))
    try:
        text = data[len(bom) :].decode(encoding)
    except UnicodeDecodeError:
        raise DocumentError("unsupported_type", f"{name} is text, but not in UTF-8: save it as UTF-8") from None
    if not text.strip():
        raise DocumentError("empty_document", f"{name} has no text in it")
    pages = [clean_plain_text(page) for page in text.split("\f")]
    return pages[:-1] if len(pages) > 1 and not pages[-1].strip() else pages


def text_page(number: int, text: str) -> Page:
    is_blank = not text.strip()
    return Page(number, text, "none" if is_blank else "text_layer", is_blank)
