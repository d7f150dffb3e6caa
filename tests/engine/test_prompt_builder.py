"""Messages with pictures -> token ids and spans, checked before a pixel is decoded."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from mmserve.engine.prompt_builder import BuiltPrompt, PromptBuilder
from mmserve.errors import RequestError
from mmserve.request import PatchesRef
from mmserve.vision.image_plan import ImagePlan, ItemPlan
from mmserve.vision.image_source import ImageSource, PixelLimits
from mmserve.vision.page_types import Document
from mmserve.vision.preprocess_pool import PlannedImage
from mmserve.vision.preprocess_worker import Processed

IMAGE, ROW, BREAK = 999, 500, 501


@dataclass(frozen=True)
class TileProcessor:
    """A picture `width` wide is as many items of three tokens, with a mark before each."""

    image_token_id: int = IMAGE

    def plan(self, width: int, height: int, limits: PixelLimits) -> ImagePlan:
        return ImagePlan(width, height, (ItemPlan(3, (1, 3)),) * width)

    def placeholder_ids(self, plan: ImagePlan) -> list[int]:
        return [token for _ in plan.items for token in (ROW, *[IMAGE] * 3)] + [BREAK]


@dataclass
class FakePool:
    processor: TileProcessor = field(default_factory=TileProcessor)
    num_held: int = 0
    budgets: list[PixelLimits] = field(default_factory=list)

    async def plan(self, source: ImageSource, limits: PixelLimits, cache_salt: bytes = b"") -> PlannedImage:
        self.budgets.append(limits)
        return PlannedImage(source, limits, self.processor.plan(source.page, 1, limits), cache_salt)

    def digest(self, image: PlannedImage) -> bytes:
        return image.source.digest + image.cache_salt

    @asynccontextmanager
    async def hold(self, images: Iterable[PlannedImage]) -> AsyncIterator[list[Processed]]:
        self.num_held += 1
        try:
            yield [
                Processed(
                    image.plan, tuple(PatchesRef(f"s{i}", (1,), "float32") for i in range(len(image.plan.items))), 0.0
                )
                for image in images
            ]
        finally:
            self.num_held -= 1


class LetterTokenizer:
    """A token a letter, and one for each picture, unless there are `lost` of them."""

    lost = 0

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **_: Any) -> list[int]:
        ids: list[int] = []
        for message in messages:
            content = message["content"]
            for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
                assert set(part) <= {"type", "text"}, "the template knows nothing of sources"
                ids += [ord(letter) for letter in part["text"]] if part["type"] == "text" else [IMAGE]
        return ids[self.lost :]


def picture(page: int, **more: Any) -> dict[str, Any]:
    document = Document(path=None, name="a.pdf", media_type="application/pdf", sha256="ab", num_pages=9)  # type: ignore[arg-type]
    return {"type": "image", "source": ImageSource(document, page), **more}


def build(builder: PromptBuilder, *parts: Any, **settings: Any) -> BuiltPrompt:
    async def run() -> BuiltPrompt:
        content = parts[0] if len(parts) == 1 and isinstance(parts[0], str) else list(parts)
        async with builder.build([{"role": "user", "content": content}], **settings) as prompt:
            return prompt

    return asyncio.run(run())


def seeing(**settings: Any) -> tuple[PromptBuilder, FakePool]:
    pool = FakePool()
    return PromptBuilder(LetterTokenizer(), pool.processor, pool, **settings), pool  # type: ignore[arg-type]


def text(letters: str) -> dict[str, str]:
    return {"type": "text", "text": letters}


def test_each_image_token_gives_way_to_what_its_picture_takes() -> None:
    builder, pool = seeing()
    prompt = build(builder, text("a"), picture(2), text("b"), picture(1))
    tile = [ROW, IMAGE, IMAGE, IMAGE]
    assert prompt.token_ids == [ord("a"), *tile, *tile, BREAK, ord("b"), *tile, BREAK]
    assert [(span.offset, span.length, span.grid) for span in prompt.images] == [
        (2, 3, (1, 3)),
        (6, 3, (1, 3)),
        (12, 3, (1, 3)),
    ]
    for span in prompt.images:
        assert prompt.token_ids[span.offset : span.end] == [IMAGE] * 3
        assert span.patches is not None
    assert pool.num_held == 0


def test_items_and_pictures_have_identities_of_their_own() -> None:
    builder, _ = seeing()
    prompt = build(builder, picture(2), picture(1), picture(2))
    hashes = [span.content_hash for span in prompt.images]
    assert hashes[0] != hashes[1] != hashes[2]
    assert hashes[:2] == hashes[3:]
    assert len(set(hashes)) == 3


def test_text_alone_needs_no_pool() -> None:
    builder, pool = seeing()
    assert build(builder, "hi") == BuiltPrompt([ord("h"), ord("i")])
    assert pool.budgets == []


def test_limits_of_a_part_come_before_those_of_all() -> None:
    builder, pool = seeing(limits=PixelLimits(None, 100))
    build(builder, picture(1), picture(1, limits=PixelLimits(None, 7)))
    assert pool.budgets == [PixelLimits(None, 100), PixelLimits(None, 7)]


def test_a_text_model_refuses_pictures() -> None:
    builder = PromptBuilder(LetterTokenizer())  # type: ignore[arg-type]
    assert not builder.reads_images
    assert build(builder, "hi").token_ids
    with pytest.raises(RequestError) as caught:
        build(builder, picture(1))
    assert caught.value.code == "images_not_supported"
    builder.close()


def test_a_prompt_over_the_context_is_refused_before_pixels_are_decoded() -> None:
    builder, pool = seeing()
    assert build(builder, picture(9), text("abc"), max_tokens=40)
    with pytest.raises(RequestError, match="lower max_pixels") as caught:
        build(builder, picture(9), text("abc"), max_tokens=39)
    assert caught.value.code == "context_length_exceeded"
    assert pool.num_held == 0


def test_a_template_that_loses_a_picture_is_an_error() -> None:
    builder, _ = seeing()
    builder._tokenizer.lost = 1  # type: ignore[attr-defined]
    with pytest.raises(RequestError, match="0 places for 1 pictures"):
        build(builder, picture(1))


def test_the_tokens_of_a_picture_include_those_between_its_tiles() -> None:
    builder, _ = seeing()
    assert asyncio.run(builder.num_image_tokens(picture(4)["source"])) == 17
