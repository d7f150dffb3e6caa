"""Messages with pictures -> token ids, and the spans in which the pictures' tokens stand."""

import asyncio
import copy
import hashlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

from mmserve.errors import RequestError
from mmserve.request import ImageSpan
from mmserve.vision.decoded_picture import PictureSource
from mmserve.vision.image_plan import ImageProcessor
from mmserve.vision.image_source import PixelLimits
from mmserve.vision.preprocess_pool import PlannedImage, PreprocessPool
from mmserve.vision.preprocess_worker import Processed
from mmserve.weights.tokenizer import Tokenizer

Message = Mapping[str, Any]


@dataclass(frozen=True)
class BuiltPrompt:
    """What the engine gets. The images' patches exist until the block that built the prompt is left."""

    token_ids: list[int]
    images: tuple[ImageSpan, ...] = ()


class PromptBuilder:
    """Messages are as chat templates know them; a content may have parts of type text and of type image.

    An image part is `{"type": "image", "source": PictureSource, "limits": PixelLimits}`, the limits being optional.
    Without `processor` and `pool` the model reads text only.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        processor: ImageProcessor | None = None,
        pool: PreprocessPool | None = None,
        *,
        limits: PixelLimits | None = None,
    ) -> None:
        """`limits` hold where a part has none of its own."""
        self._tokenizer = tokenizer
        self._processor = processor
        self.pool = pool
        self.limits = limits or PixelLimits()
        self._cache_salt = b""

    def salted(self, cache_salt: bytes) -> Self:
        """The same builder with the same pool, whose pictures are shared with those of the same salt alone."""
        salted = copy.copy(self)
        salted._cache_salt = cache_salt
        return salted

    @property
    def reads_images(self) -> bool:
        return self._processor is not None and self.pool is not None

    async def num_image_tokens(self, source: PictureSource, limits: PixelLimits | None = None) -> int:
        """Tokens that the picture takes in a prompt, those between its tiles included; no pixel is decoded."""
        processor, pool = self._vision()
        planned = await pool.plan(source, limits or self.limits, self._cache_salt)
        return len(processor.placeholder_ids(planned.plan))

    @asynccontextmanager
    async def build(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int | None = None,
        template_arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> AsyncIterator[BuiltPrompt]:
        """The prompt, for as long as the block lasts: leave it when the answer is complete.

        Raises `RequestError` for pictures that the model cannot take, and `context_length_exceeded` for a prompt of
        more than `max_tokens`, before any pixel is decoded; `DocumentError` for a picture that cannot be read.
        """
        parts = list(_image_parts(messages))
        if not parts:
            yield BuiltPrompt(await self._encode(messages, template_arguments))
            return
        processor, pool = self._vision()
        plans = (pool.plan(part["source"], part.get("limits") or self.limits, self._cache_salt) for part in parts)
        token_ids, planned = await asyncio.gather(self._encode(messages, template_arguments), asyncio.gather(*plans))
        self._check(token_ids, planned, max_tokens)
        async with pool.hold(planned) as processed:
            yield _expanded(token_ids, processor, list(zip(map(pool.digest, planned), processed, strict=True)))

    def close(self) -> None:
        """End the pool's processes, if there are any."""
        if self.pool is not None:
            self.pool.close()

    def _vision(self) -> tuple[ImageProcessor, PreprocessPool]:
        if self._processor is None or self.pool is None:
            raise RequestError(
                "images_not_supported",
                "the model served here reads text only: leave the pictures out, or serve a vision-language model",
                param="messages",
            )
        return self._processor, self.pool

    async def _encode(self, messages: Sequence[Message], template_arguments: Mapping[str, Any]) -> list[int]:
        bare = [_without_sources(message) for message in messages]
        return await asyncio.to_thread(self._tokenizer.encode_chat, bare, **template_arguments)

    def _check(self, token_ids: Sequence[int], planned: Sequence[PlannedImage], max_tokens: int | None) -> None:
        processor, _ = self._vision()
        num_places = token_ids.count(processor.image_token_id)
        if num_places != len(planned):
            raise RequestError(
                "invalid_request",
                f"the model's chat template has {num_places} places for {len(planned)} pictures: it may take fewer in"
                " a conversation, or none in this message",
                param="messages",
            )
        num_image_tokens = sum(len(processor.placeholder_ids(image.plan)) for image in planned)
        num_tokens = len(token_ids) - num_places + num_image_tokens
        if max_tokens is not None and num_tokens > max_tokens:
            raise RequestError(
                "context_length_exceeded",
                f"the prompt has {num_tokens} tokens, {num_image_tokens} of them for {len(planned)} pictures, but the"
                f" context has room for {max_tokens}: send fewer pictures or pages, lower max_pixels, or start with a"
                " larger --max-model-len",
                param="messages",
            )


def _expanded(
    token_ids: Sequence[int], processor: ImageProcessor, images: Sequence[tuple[bytes, Processed]]
) -> BuiltPrompt:
    """Each image token gives way to what its picture takes."""
    rest = iter(images)
    ids: list[int] = []
    spans: list[ImageSpan] = []
    for token_id in token_ids:
        if token_id != processor.image_token_id:
            ids.append(token_id)
            continue
        digest, processed = next(rest)
        placeholders = processor.placeholder_ids(processed.plan)
        spans += _spans(placeholders, len(ids), processor.image_token_id, digest, processed)
        ids += placeholders
    return BuiltPrompt(ids, tuple(spans))


def _spans(
    placeholders: Sequence[int], offset: int, image_token_id: int, digest: bytes, processed: Processed
) -> Iterator[ImageSpan]:
    """The runs of image tokens in one picture's placeholders, each an item of its plan."""
    cursor = 0
    for index, (item, ref) in enumerate(zip(processed.plan.items, processed.patches, strict=True)):
        start = placeholders.index(image_token_id, cursor)
        cursor = start + item.num_tokens
        content_hash = hashlib.blake2b(digest + index.to_bytes(4, "little"), digest_size=16).digest()
        yield ImageSpan(offset + start, item.num_tokens, content_hash, item.grid, ref)


def _image_parts(messages: Sequence[Message]) -> Iterator[Mapping[str, Any]]:
    for message in messages:
        content = message.get("content")
        if isinstance(content, list | tuple):
            yield from filter(_is_image, content)


def _is_image(part: object) -> bool:
    """Raises `RequestError` for an image part without its picture; what else is wrong with a part the template says."""
    if not isinstance(part, Mapping) or part.get("type") != "image":
        return False
    if "source" not in part:
        raise RequestError("invalid_request", "a part of type image has no picture", param="messages")
    return True


def _without_sources(message: Message) -> Message:
    """What the template may know of a picture is that there is one."""
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return message
    return {**message, "content": [{"type": "image"} if _is_image(part) else part for part in content]}
