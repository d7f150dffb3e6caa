"""Which picture is meant, and how many pixels of it an encoder may get. Needs no torch."""

import hashlib
from dataclasses import dataclass

from mmserve.errors import RequestError
from mmserve.vision.page_types import Document, RenderSettings

# A page of A4 becomes 1240 x 1754; a picture of more pixels than these is reduced before the processor sees it.
PICTURE_SETTINGS = RenderSettings(dpi=150, max_pixels=16_000_000)
# The ceiling where nobody says otherwise: a page of A4 just fits. Some checkpoints would take six times that, and so
# six times as many tokens.
AUTO_PIXELS = 1540 * 1540


@dataclass(frozen=True)
class PixelLimits:
    """How many pixels of one picture the encoder may get, and how many at least; None leaves it to the checkpoint.

    Qwen's families scale the picture. Families of tiles take fewer tiles: what counts are the pixels of all tiles and
    of the overview, and one tile's worth is always taken; they, and LLaVA-1.5, have no use for `min_pixels`.

    With `is_ceiling`, `max_pixels` only lowers what the checkpoint would take, and never raises it.
    """

    min_pixels: int | None = None
    max_pixels: int | None = None
    is_ceiling: bool = False

    def __post_init__(self) -> None:
        for name in ("min_pixels", "max_pixels"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RequestError("invalid_request", f"{name} must be at least 1", param=name)

    def or_auto(self) -> "PixelLimits":
        """These, with the usual ceiling where there is no maximum."""
        return self if self.max_pixels is not None else PixelLimits(self.min_pixels, AUTO_PIXELS, is_ceiling=True)

    def allows_tiles(self, num_tiles: int, tile_size: int) -> bool:
        """Whether that many square tiles, the overview among them, stay within `max_pixels`."""
        return self.max_pixels is None or num_tiles * tile_size**2 <= self.max_pixels


@dataclass(frozen=True)
class ImageSource:
    """A picture, or a page (or frame) of a document, counted from 1."""

    document: Document
    page: int = 1

    @property
    def name(self) -> str:
        document = self.document
        return document.name if document.num_pages == 1 else f"page {self.page} of {document.name}"

    @property
    def digest(self) -> bytes:
        """Of the file's bytes, the page, and how the page is drawn."""
        identity = f"{self.document.sha256}:{self.page}:{PICTURE_SETTINGS!r}"
        return hashlib.blake2b(identity.encode(), digest_size=16).digest()
