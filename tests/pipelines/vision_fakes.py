"""Prompts of a model that sees: a picture is a word for each of its tokens, and what was built is remembered."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from text_fakes import BuiltPrompt, WordTokenizer

from mmserve.errors import DocumentError
from mmserve.request import ImageSpan
from mmserve.vision.image_source import AUTO_PIXELS, ImageSource, PixelLimits


@dataclass
class SeeingPrompts:
    """A picture takes a token for `pixels_per_token` of the pixels that it may have."""

    tokenizer: WordTokenizer
    pixels_per_token: int = AUTO_PIXELS // 100
    limits: PixelLimits = field(default_factory=PixelLimits)
    is_damaged: Callable[[int], bool] = lambda _page: False
    messages: list[list[dict[str, Any]]] = field(default_factory=list)
    num_held: int = 0

    reads_images = True

    async def num_image_tokens(self, source: ImageSource, limits: PixelLimits | None = None) -> int:
        assert limits is not None
        assert limits.max_pixels is not None
        return max(limits.max_pixels // self.pixels_per_token, 1)

    @asynccontextmanager
    async def build(self, messages: Sequence[Mapping[str, Any]]) -> AsyncIterator[BuiltPrompt]:
        self.messages.append([dict(message) for message in messages])
        images: list[ImageSpan] = []
        texts = []
        for message in messages:
            content = message["content"]
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            for part in parts:
                texts.append(await self._text(part, images) if part["type"] == "image" else part["text"])
        self.num_held += 1
        try:
            yield BuiltPrompt(self.tokenizer.encode("".join(texts)), tuple(images))
        finally:
            self.num_held -= 1

    async def _text(self, part: Mapping[str, Any], images: list[ImageSpan]) -> str:
        source: ImageSource = part["source"]
        if self.is_damaged(source.page):
            raise DocumentError("corrupt_document", f"page {source.page} cannot be drawn")
        num_tokens = await self.num_image_tokens(source, part["limits"])
        images.append(ImageSpan(0, num_tokens, source.digest))
        return f"<picture-{source.page}>" + " ." * (num_tokens // 2)
