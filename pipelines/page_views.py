"""What a request gets to see of a page: its text, or its picture with or without the text."""

from dataclasses import replace
from typing import Literal

from mmserve.errors import RequestError
from mmserve.pipelines.chunking import PagePicture, PageText
from mmserve.pipelines.engine_protocol import Prompts
from mmserve.pipelines.events import PageSource
from mmserve.vision.image_source import ImageSource, PixelLimits
from mmserve.vision.page_types import Document
from mmserve.vision.sniff import TEXT_TYPE

Mode = Literal["auto", "vision", "text"]
# Marks and line ends around a picture.
MARK_TOKENS = 32
_ATTEMPTS = 8


def sends_pictures(mode: Mode, prompts: Prompts, document: Document) -> bool:
    """Raises `RequestError` where pictures are asked for and the model takes none."""
    if mode == "vision" and not prompts.reads_images:
        raise RequestError(
            "images_not_supported",
            "mode vision needs a vision-language model, and this one reads text only: take mode auto or text",
            param="mode",
        )
    return mode != "text" and prompts.reads_images and document.media_type != TEXT_TYPE


class PageViews:
    """Pages of one document as pictures that fit a request; in mode auto with the text layer, where that fits too."""

    def __init__(self, document: Document, prompts: Prompts, mode: Mode, limits: PixelLimits, budget: int) -> None:
        """`budget` is what a request has for pages, in tokens."""
        self._document = document
        self._prompts = prompts
        self._mode = mode
        self._limits = limits.or_auto()
        self._budget = budget - MARK_TOKENS

    async def view(self, page: PageText, source: PageSource, num_text_tokens: int) -> PageText:
        """Raises `RequestError` for a page that no budget of pixels makes small enough."""
        picture = await self._picture(page.number)
        has_hint = self._mode == "auto" and source == "text_layer"
        is_room = picture.num_tokens + num_text_tokens <= self._budget
        return replace(page, text=page.text if has_hint and is_room else "", picture=picture)

    async def _picture(self, number: int) -> PagePicture:
        """A page as large as the limits allow, and smaller where it would not leave room for itself."""
        image, limits = ImageSource(self._document, number), self._limits
        for _ in range(_ATTEMPTS):
            num_tokens = await self._prompts.num_image_tokens(image, limits)
            if num_tokens <= self._budget:
                return PagePicture(image, limits, num_tokens)
            assert limits.max_pixels is not None
            limits = PixelLimits(None, max(int(0.9 * limits.max_pixels * self._budget / num_tokens), 1))
        raise RequestError(
            "context_length_exceeded",
            f"a page takes {num_tokens} tokens as a picture, and the model's context leaves {self._budget}: take mode"
            " text, or start with a larger --max-model-len",
            param="mode",
        )
