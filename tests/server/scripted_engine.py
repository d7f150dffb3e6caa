"""An engine without a model: it answers by script, and remembers what was asked, finished and aborted."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mmserve.config import EngineConfig, SchedulerConfig
from mmserve.engine.client import CompletionDelta, RequestTimings
from mmserve.engine.messages import EngineStats
from mmserve.errors import MMServeError, RequestError
from mmserve.request import ImageSpan, SamplingParams, TokenLogprob


class ByteTokenizer:
    """A token is a byte; a chat is its roles and contents in angle brackets."""

    vocab_size = 256
    bos_token_id = None
    eos_token_ids: tuple[int, ...] = (0,)
    chat_template: str | None = "scripted"

    def encode(self, text: str, *, add_special_tokens: bool = False, parse_special: bool = True) -> list[int]:
        return list(text.encode())

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **arguments: Any
    ) -> list[int]:
        if "refuse" in arguments:
            raise RequestError("invalid_request", "the chat template refuses")
        return self.encode("".join(f"<{message['role']}>{message['content']}" for message in messages))

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


@dataclass
class ScriptedEngine:
    """Gives `answer`, a character a token, `seconds_per_token` apart; `fail_after` characters it raises `failure`."""

    answer: str = "Hello, world"
    seconds_per_token: float = 0.0
    failure: Exception | None = None
    fail_after: int = 0
    state: Literal["starting", "ready", "dead"] = "ready"
    stats: EngineStats = field(default_factory=EngineStats)
    num_restarts: int = 0
    max_model_len: int = 4096
    config: EngineConfig = field(
        default_factory=lambda: EngineConfig(
            served_model_name=("scripted", "org/alias"), scheduler=SchedulerConfig(max_num_seqs=2, max_num_waiting=2)
        )
    )
    tokenizer: Any = field(default_factory=ByteTokenizer)
    observers: list[Callable[[RequestTimings], None]] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    images: list[tuple[ImageSpan, ...]] = field(default_factory=list)
    salts: list[bytes] = field(default_factory=list)
    started: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        images: Sequence[ImageSpan] = (),
        cache_salt: bytes = b"",
    ) -> AsyncGenerator[CompletionDelta, None]:
        name = request_id or "anonymous"
        if not all(0 <= token_id < ByteTokenizer.vocab_size for token_id in prompt_token_ids):
            raise RequestError("invalid_request", "the prompt has tokens that are none")
        self.prompts.append(bytes(prompt_token_ids).decode(errors="replace"))
        self.params.append(params)
        self.images.append(tuple(images))
        self.salts.append(cache_salt)
        self.started.append(name)
        try:
            async for delta in self._script(len(prompt_token_ids), params):
                yield delta
            self.finished.append(name)
        except (GeneratorExit, asyncio.CancelledError):
            self.aborted.append(name)
            raise

    async def _script(self, num_prompt_tokens: int, params: SamplingParams) -> AsyncGenerator[CompletionDelta, None]:
        text = self.answer if params.max_tokens is None else self.answer[: params.max_tokens]
        for position, character in enumerate(text):
            if self.failure is not None and position == self.fail_after:
                raise self.failure
            await asyncio.sleep(self.seconds_per_token)
            is_last = position == len(text) - 1
            for index in range(params.n):
                yield self._delta(index, character, is_last, len(text) < len(self.answer), num_prompt_tokens, params)

    def _delta(
        self, index: int, text: str, is_last: bool, is_cut: bool, num_prompt_tokens: int, params: SamplingParams
    ) -> CompletionDelta:
        token_id = text.encode()[0]
        others = tuple((token_id + i, -1.0 - i) for i in range(params.logprobs or 0))
        return CompletionDelta(
            index=index,
            text=text,
            token_ids=(token_id,),
            logprobs=() if params.logprobs is None else (TokenLogprob(token_id, float("-inf"), others),),
            finish_reason=None if not is_last else "length" if is_cut else "stop",
            stop_reason=None,
            num_prompt_tokens=num_prompt_tokens,
            num_cached_tokens=3,
        )


def failing(error: MMServeError | Exception, *, after: int) -> ScriptedEngine:
    return ScriptedEngine(failure=error, fail_after=after)
