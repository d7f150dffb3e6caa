"""Which picture is meant, and how many pixels of it an encoder may get. Needs no torch."""

import hashlib
from dataclasses import dataclass

from mmserve.errors import RequestError
from mmserve.vision.page_types import Document, RenderSettings

# A page of A4 becomes 1240 x 1754; a picture of more pixels than these is reduced before the processor sees it.
PICTURE_SETTINGS = RenderSettings(dpi=150, max_pixels=16_000_000)
# Where nobody says otherwise, a picture that would take more tokens than a page of A4 at 28 x 28 pixels a token is
# given that page's pixels: some checkpoints would take six times as many.
AUTO_PIXELS = 1540 * 1540
AUTO_TOKENS = 3072
# As OpenAI has it.
LOW_DETAIL_PIXELS = 512 * 512


@dataclass(frozen=True)
class PixelLimits:
    """How many pixels of one picture the encoder may get, and how many at least; None leaves it to the checkpoint.

    Qwen's families scale the picture. Families of tiles take fewer tiles: what counts are the pixels of all tiles and
    of the overview, and one tile's worth is always taken; they, and LLaVA-1.5, have no use for `min_pixels`.

    With `is_ceiling`, `max_pixels` only lowers what the checkpoint would take, and never raises it; and that only for
    pictures that would take more than `spared_tokens`.
    """

    min_pixels: int | None = None
    max_pixels: int | None = None
    is_ceiling: bool = False
    spared_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("min_pixels", "max_pixels"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RequestError("invalid_request", f"{name} must be at least 1", param=name)

    def narrowed(self, *, min_pixels: int | None, max_pixels: int | None) -> "PixelLimits":
        """An operator's limits with what a request asks for instead.

        Raises `RequestError` for more pixels than the operator allows, and for limits that contradict.
        """
        for name, value in (("max_pixels", max_pixels), ("min_pixels", min_pixels)):
            if self.max_pixels is not None and value is not None and value > self.max_pixels:
                raise RequestError("invalid_request", f"{name} may be at most {self.max_pixels} here", param=name)
        if min_pixels is not None and max_pixels is not None and min_pixels > max_pixels:
            raise RequestError("invalid_request", "min_pixels must not exceed max_pixels", param="min_pixels")
        asked = PixelLimits(min_pixels, max_pixels)
        most = asked.max_pixels or self.max_pixels
        return PixelLimits(_at_most(asked.min_pixels or self.min_pixels, most), most)

    def low_detail(self) -> "PixelLimits":
        most = min(LOW_DETAIL_PIXELS, self.max_pixels or LOW_DETAIL_PIXELS)
        return PixelLimits(_at_most(self.min_pixels, most), most, is_ceiling=True)

    def or_auto(self) -> "PixelLimits":
        """These, with the usual ceiling where there is no maximum."""
        if self.max_pixels is not None:
            return self
        return PixelLimits(self.min_pixels, AUTO_PIXELS, is_ceiling=True, spared_tokens=AUTO_TOKENS)

    def allows_tiles(self, num_tiles: int, tile_size: int) -> bool:
        """Whether that many square tiles, the overview among them, stay within `max_pixels`."""
        return self.max_pixels is None or num_tiles * tile_size**2 <= self.max_pixels


def _at_most(value: int | None, most: int | None) -> int | None:
    return value if value is None or most is None else min(value, most)


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
