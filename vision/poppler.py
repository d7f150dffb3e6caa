"""Rendering by poppler's programs, where they are installed."""

import shutil
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mmserve.errors import DocumentError, SetupError

_TIMEOUT_SECONDS = 60


def check_poppler() -> None:
    """Raises `SetupError` (`missing_dependency`) where poppler is not installed."""
    if shutil.which("pdftoppm") is None:
        raise SetupError("missing_dependency", "poppler is not installed: apt install poppler-utils (or brew, dnf)")


def render_with_poppler(path: Path, number: int, dpi: float) -> npt.NDArray[np.uint8]:
    """RGB [height, width, 3] of page `number`. Raises `DocumentError`."""
    import pdf2image
    from pdf2image import exceptions

    try:
        images = pdf2image.convert_from_path(
            path, first_page=number, last_page=number, dpi=dpi, use_cropbox=True, timeout=_TIMEOUT_SECONDS
        )
    except (exceptions.PDFPageCountError, exceptions.PDFSyntaxError, exceptions.PDFPopplerTimeoutError):
        images = []
    if not images:
        raise DocumentError("corrupt_document", f"poppler cannot render page {number}")
    return np.asarray(images[0].convert("RGB"))
