"""What pipelines ask of an engine, so that they run against the real one and against a scripted one alike."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from mmserve.config import EngineConfig
from mmserve.request import FinishReason, SamplingParams


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
        self, prompt_token_ids: Sequence[int], params: SamplingParams, *, request_id: str | None = None
    ) -> AsyncGenerator[TextDelta, None]: ...
