"""What a document and its pages are to the rest of mmserve, and the limits under which they are read."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mmserve.errors import MMServeError, RequestError

OcrName = Literal["auto", "rapidocr", "tesseract", "off"]
RendererName = Literal["auto", "pdfium", "poppler"]
TextSource = Literal["text_layer", "ocr", "none"]
# What is made of pages: text; text and its layout as Markdown; or what can be told without OCR, for who looks himself.
PageForm = Literal["text", "markdown", "picture"]
MIB = 1024**2
MAX_CROWDING = 5.0


@dataclass(frozen=True, kw_only=True)
class PageLimits:
    """What is refused before it is rasterised. `max_pixels` is one picture's; `page_timeout` is seconds of work on a
    page, which a busy machine may take up to `MAX_CROWDING` times as long for.

    `worker_memory_bytes` bounds the heap of one worker process, so that a bomb ends its page and not the machine.
    """

    max_bytes: int = 200 * MIB
    max_pages: int = 2000
    max_pixels: int = 70_000_000
    page_timeout: float = 60.0
    worker_memory_bytes: int = 1024 * MIB

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_pages", "max_pixels", "page_timeout", "worker_memory_bytes"):
            if getattr(self, name) <= 0:
                raise RequestError("invalid_request", f"{name} must be positive", param=name)


@dataclass(frozen=True, kw_only=True)
class PageOptions:
    """How pages are read. `dpi` is the resolution at which a PDF page is rendered for OCR."""

    ocr: OcrName = "auto"
    renderer: RendererName = "auto"
    dpi: int = 200

    def __post_init__(self) -> None:
        if not 36 <= self.dpi <= 600:
            raise RequestError("invalid_request", "dpi must be between 36 and 600", param="dpi")

    @property
    def renderer_in_use(self) -> Literal["pdfium", "poppler"]:
        return "poppler" if self.renderer == "poppler" else "pdfium"


@dataclass(frozen=True)
class Document:
    """A file that was opened: `sha256` is of its bytes, `name` is what a user calls it."""

    path: Path
    name: str
    media_type: str
    sha256: str
    num_pages: int
    attachments: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Page:
    """One page as text. `width` and `height` are points for PDF, pixels for pictures, as a reader sees the page.

    A page that could not be read has its reason in `problem` and no text. `notes` are sentences for the user.
    `markdown` is the text as it is laid out, where pages were asked for in that form.
    """

    number: int
    text: str = ""
    source: TextSource = "none"
    is_blank: bool = False
    width: float = 0.0
    height: float = 0.0
    problem: MMServeError | None = None
    notes: tuple[str, ...] = ()
    markdown: str = ""


@dataclass(frozen=True, kw_only=True)
class RenderSettings:
    """All that decides a page's pixels: resolution of a PDF page, then a budget to which any page is scaled down."""

    dpi: int = 150
    max_pixels: int = 4_000_000
    renderer: Literal["pdfium", "poppler"] = "pdfium"
