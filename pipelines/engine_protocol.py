"""What pipelines ask of an engine, so that they run against the real one and against a scripted one alike."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from mmserve.config import EngineConfig
from mmserve.request import FinishReason, ImageSpan, SamplingParams
from mmserve.vision.image_source import ImageSource, PixelLimits


class TextTokenizer(Protocol):
    """Text and chats -> ids; a message that spells a control token stays text."""

    def encode(self, text: str, *, add_special_tokens: bool = False, parse_special: bool = True) -> list[int]: ...

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **template_kwargs: Any
    ) -> list[int]: ...


class TextDelta(Protocol):
    """What is new of an answer; the last one carries `finish_reason`."""

    @property
    def text(self) -> str: ...

    @property
    def token_ids(self) -> tuple[int, ...]: ...

    @property
    def finish_reason(self) -> FinishReason | None: ...

    @property
    def num_prompt_tokens(self) -> int: ...


class TextEngine(Protocol):
    """`generate` raises `RequestError` or `EngineError`; closing its iterator aborts the request."""

    @property
    def tokenizer(self) -> TextTokenizer: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def config(self) -> EngineConfig: ...

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        images: Sequence[ImageSpan] = (),
    ) -> AsyncGenerator[TextDelta, None]: ...


class Prompt(Protocol):
    """What goes to the engine; its images exist until the block that built it is left."""

    @property
    def token_ids(self) -> list[int]: ...

    @property
    def images(self) -> tuple[ImageSpan, ...]: ...


class Prompts(Protocol):
    """Messages, pictures in them or not, -> prompts. `engine.prompt_builder` says what each does."""

    @property
    def reads_images(self) -> bool: ...

    @property
    def limits(self) -> PixelLimits: ...

    async def num_image_tokens(self, source: ImageSource, limits: PixelLimits | None = None) -> int: ...

    def build(self, messages: Sequence[Mapping[str, Any]]) -> AbstractAsyncContextManager[Prompt]: ...
