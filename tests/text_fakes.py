"""A model of text by script, which takes a word for a token; for whatever stands on pipelines."""

import asyncio
import functools
import hashlib
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from mmserve.config import EngineConfig, SchedulerConfig
from mmserve.pipelines.engine_protocol import TextTokenizer
from mmserve.request import FinishReason, ImageSpan, SamplingParams
from mmserve.vision.image_source import ImageSource, PixelLimits


class WordTokenizer:
    """A token is a word or a run of spaces, with a number that follows from it; a chat is its roles and contents."""

    def encode(self, text: str, *, add_special_tokens: bool = False, parse_special: bool = True) -> list[int]:
        return [_word_id(piece) for piece in re.findall(r"\S+|\s+", text)]

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **template_kwargs: Any
    ) -> list[int]:
        return self.encode("\n".join(f"<{message['role']}> {message['content']}" for message in messages))

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(_WORDS[token_id] for token_id in ids)


_WORDS: dict[int, str] = {}


@functools.cache
def _word_id(piece: str) -> int:
    """The same in every process."""
    token_id = int.from_bytes(hashlib.sha256(piece.encode()).digest()[:6])
    _WORDS[token_id] = piece
    return token_id


@dataclass(frozen=True)
class Delta:
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    num_prompt_tokens: int


@dataclass
class ScriptedTextEngine:
    """Answers a prompt with `answer(prompt)`, a word every `delay` seconds; with `hangs` it never ends an answer."""

    answer: Callable[[str], str] = lambda _prompt: "Nothing."
    max_model_len: int = 2000
    max_num_seqs: int = 8
    delay: float = 0.0
    hangs: bool = False
    failure: Exception | None = None
    tokenizer: WordTokenizer = field(default_factory=WordTokenizer)
    prompts: list[str] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    num_running: int = 0
    most_running: int = 0
    num_aborted: int = 0

    @property
    def config(self) -> EngineConfig:
        return EngineConfig(served_model_name=("scripted",), scheduler=SchedulerConfig(max_num_seqs=self.max_num_seqs))

    def hangs_at(self, prompt: str) -> bool:
        return self.hangs

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        images: Sequence[ImageSpan] = (),
    ) -> AsyncGenerator[Delta, None]:
        self.prompts.append(self.tokenizer.decode(prompt_token_ids))
        self.params.append(params)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        is_whole = False
        try:
            async for delta in self._deltas(prompt_token_ids, params):
                yield delta
            is_whole = True
        finally:
            self.num_running -= 1
            self.num_aborted += not is_whole

    async def _deltas(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> AsyncGenerator[Delta, None]:
        if self.failure is not None:
            raise self.failure
        prompt = self.tokenizer.decode(prompt_token_ids)
        hangs = self.hangs_at(prompt)
        ids = self.tokenizer.encode(self.answer(prompt))
        is_cut = params.max_tokens is not None and len(ids) > params.max_tokens
        for place, token_id in enumerate(ids := ids[: params.max_tokens]):
            await asyncio.sleep(self.delay)
            is_last = place == len(ids) - 1 and not hangs
            reason: FinishReason | None = ("length" if is_cut else "stop") if is_last else None
            yield Delta(self.tokenizer.decode([token_id]), (token_id,), reason, len(prompt_token_ids))
        if hangs:
            await asyncio.Event().wait()


@dataclass(frozen=True)
class BuiltPrompt:
    token_ids: list[int]
    images: tuple[ImageSpan, ...] = ()


class TextPrompts:
    """Prompts of an engine that reads text only."""

    reads_images = False
    limits = PixelLimits()

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer

    async def num_image_tokens(self, source: ImageSource, limits: PixelLimits | None = None) -> int:
        raise NotImplementedError("a text model takes no pictures")

    @asynccontextmanager
    async def build(self, messages: Sequence[Mapping[str, Any]]) -> AsyncIterator[BuiltPrompt]:
        yield BuiltPrompt(self._tokenizer.encode_chat(messages))
