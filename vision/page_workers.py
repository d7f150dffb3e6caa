"""What runs in a page worker: a process that opens, reads and renders, and that may die without harm to others."""

import io
import math
import os
import resource
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from pypdfium2 import PdfiumError

from mmserve.errors import DocumentError, MMServeError
from mmserve.vision.image import RGB, ImageFile
from mmserve.vision.ocr import OcrEngine, choose_engine, load_engine
from mmserve.vision.page_reading import OCR_PIXELS, OcrAccess, OcrNeeded, read_image_page, read_pdf_page
from mmserve.vision.page_types import MAX_CROWDING, Document, Page, PageForm, PageLimits, PageOptions, RenderSettings
from mmserve.vision.pdf import PdfFile
from mmserve.vision.poppler import render_with_poppler
from mmserve.vision.process_memory import give_back_memory, heap_bytes, keep_heap_small
from mmserve.vision.sniff import PDF_TYPE

_MAX_OPEN_DOCUMENTS = 2
_MAX_KEPT_PIXELS = 20_000_000
_PARENT_CHECK_SECONDS = 2.0
_BATCH_SECONDS = 1.0
_NICENESS = 10
_MAX_DRAWN_DPI = 600
_MAX_DRAWN_PIXELS = 16_000_000


@dataclass(frozen=True)
class Opened:
    """What opening a file tells about it."""

    num_pages: int
    attachments: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class PageWorker:
    """The work of one process. pdfium allows one call at a time, so nothing here may run in two threads."""

    def __init__(self, limits: PageLimits, options: PageOptions, num_ocr_threads: int) -> None:
        self._limits = limits
        self._options = options
        self._num_ocr_threads = num_ocr_threads
        self._open_files: OrderedDict[tuple[Path, int, int], PdfFile | ImageFile] = OrderedDict()
        self._engine: OcrEngine | None = None
        self._ocr_name = choose_engine(options.ocr)

    def open(self, path: Path, name: str, media_type: str) -> Opened:
        file = self._file(path, name, media_type)
        if isinstance(file, PdfFile):
            return Opened(file.num_pages, file.attachments())
        return Opened(file.num_pages, notes=file.notes)

    def read_without_ocr(self, document: Document, numbers: Sequence[int], form: PageForm) -> list[Page | None]:
        """Pages that need no OCR, as far as they come within a moment; None for those to be read alone."""
        end = time.monotonic() + _BATCH_SECONDS
        return [
            self._read(document, number, form, self._no_engine_yet) if time.monotonic() < end else None
            for number in numbers
        ]

    def read_page(self, document: Document, number: int, form: PageForm = "text") -> Page:
        page = self._read(document, number, form, self._load_engine)
        give_back_memory()
        assert page is not None
        return page

    def render_page(self, document: Document, number: int, settings: RenderSettings) -> RGB:
        """Pixels `[height, width, 3]`. Raises `DocumentError` for a page that cannot be rendered."""
        file = self._file(document.path, document.name, document.media_type)
        if isinstance(file, ImageFile):
            return file.pixels(number, settings.max_pixels)
        return _render(file, document.path, number, settings)

    def image_size(self, document: Document, number: int, settings: RenderSettings) -> tuple[int, int]:
        """Width and height of what `render_page` gives, without drawing it. Raises `DocumentError`."""
        file = self._file(document.path, document.name, document.media_type)
        if isinstance(file, ImageFile):
            return file.fitted_size(number, settings.max_pixels)
        with file.page(number) as page:
            scale = page.scale_for(settings.dpi, settings.max_pixels)
            return math.ceil(page.width * scale), math.ceil(page.height * scale)

    def draw_page(self, document: Document, number: int, width: int) -> bytes:
        """The page as a PNG, `width` pixels wide, less where it would be too large. Raises `DocumentError`."""
        if document.media_type == PDF_TYPE:
            pixels = self._pdf_at_width(document, number, width)
        else:
            # Not one of the open files: a decoder that has reduced a picture has nothing larger of it any more.
            with closing(ImageFile(document.path, document.name, document.media_type, self._limits)) as image:
                pixels = image.pixels(number, _pixels_at_width(image.size(number), width))
        drawn = io.BytesIO()
        Image.fromarray(_at_width(pixels, width)).save(drawn, "PNG")
        give_back_memory()
        return drawn.getvalue()

    def _pdf_at_width(self, document: Document, number: int, width: int) -> RGB:
        file = self._file(document.path, document.name, document.media_type)
        assert isinstance(file, PdfFile)
        with file.page(number) as page:
            # A hair less, so that rounding up does not add a column.
            scale = (1 - 1e-9) * width / max(page.width, 1.0)
            return page.render(min(scale, page.scale_for(_MAX_DRAWN_DPI, _MAX_DRAWN_PIXELS)))

    def close(self) -> None:
        while self._open_files:
            self._open_files.popitem()[1].close()

    def _read(self, document: Document, number: int, form: PageForm, engine: Callable[[], OcrEngine]) -> Page | None:
        has_ocr = self._ocr_name is not None and form != "picture"
        ocr = OcrAccess(engine if has_ocr else None, form)
        try:
            file = self._file(document.path, document.name, document.media_type)
            if isinstance(file, ImageFile):
                return self._read_image(file, number, ocr)
            settings = RenderSettings(
                dpi=self._options.dpi, max_pixels=OCR_PIXELS, renderer=self._options.renderer_in_use
            )
            with file.page(number) as page:
                return read_pdf_page(
                    page,
                    number,
                    ocr=ocr,
                    render=lambda: _render(file, document.path, number, settings),
                    limits=self._limits,
                )
        except OcrNeeded:
            return None
        except MMServeError as error:
            return Page(number, problem=error)
        except PdfiumError:
            return Page(number, problem=DocumentError("corrupt_document", f"page {number} is damaged"))
        except MemoryError:
            message = f"page {number} takes more memory than one page may"
            return Page(number, problem=DocumentError("page_too_large", message))

    def _read_image(self, image: ImageFile, number: int, ocr: OcrAccess) -> Page:
        """A large picture is not kept open: it would keep its pixels."""
        page = read_image_page(image, number, ocr)
        if page.width * page.height > _MAX_KEPT_PIXELS:
            self.close()
        return page

    def _file(self, path: Path, name: str, media_type: str) -> PdfFile | ImageFile:
        """An open file, from the few that were used last."""
        try:
            status = path.stat()
        except OSError:
            raise DocumentError("corrupt_document", f"{name} is no longer there") from None
        key = (path, status.st_mtime_ns, status.st_size)
        if key not in self._open_files:
            while len(self._open_files) >= _MAX_OPEN_DOCUMENTS:
                self._open_files.popitem(last=False)[1].close()
            is_pdf = media_type == PDF_TYPE
            self._open_files[key] = (
                PdfFile(path, name, self._limits) if is_pdf else ImageFile(path, name, media_type, self._limits)
            )
        self._open_files.move_to_end(key)
        return self._open_files[key]

    def _no_engine_yet(self) -> OcrEngine:
        raise OcrNeeded

    def _load_engine(self) -> OcrEngine:
        if self._engine is None:
            assert self._ocr_name is not None
            self._engine = load_engine(
                self._ocr_name, num_threads=self._num_ocr_threads, timeout=self._limits.page_timeout * MAX_CROWDING
            )
        return self._engine


def _pixels_at_width(size: tuple[int, int], width: int) -> int:
    """How many pixels of a picture of this size to decode where `width` is wanted: twice as wide keeps it sharp."""
    scale = min(1.0, 2 * width / size[0])
    return min(math.ceil(size[0] * size[1] * scale**2), _MAX_DRAWN_PIXELS)


def _at_width(pixels: RGB, width: int) -> RGB:
    """The last step to `width`: a picture that is narrower stays as it is."""
    if pixels.shape[1] <= width:
        return pixels
    height = max(1, round(pixels.shape[0] * width / pixels.shape[1]))
    return np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.LANCZOS))


def _render(file: PdfFile, path: Path, number: int, settings: RenderSettings) -> RGB:
    with file.page(number) as page:
        scale = page.scale_for(settings.dpi, settings.max_pixels)
        if settings.renderer == "pdfium":
            return page.render(scale)
    return render_with_poppler(path, number, 72 * scale)


def start_page_worker(limits: PageLimits, options: PageOptions, num_ocr_threads: int) -> PageWorker:
    """Set this process up as a page worker."""
    take_place(limits)
    return PageWorker(limits, options, num_ocr_threads)


def take_place(limits: PageLimits) -> None:
    """This process works behind the engine from now on, its memory bounded, its life bound to its parent's."""
    # The engine's threads wait for one another many times a step: a reader that holds a core back stalls them all.
    os.nice(_NICENESS)
    keep_heap_small()
    own = heap_bytes()
    if own is not None:
        bound = own + limits.worker_memory_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (bound, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()


def _end_with_parent(parent: int) -> None:
    pause = threading.Event()
    while os.getppid() == parent:
        pause.wait(_PARENT_CHECK_SECONDS)
    os._exit(1)
