"""From prompts to deltas and whole answers: several prompts as one request, counted once."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mmserve.pipelines.concurrency import end_all
from mmserve.request import FinishReason, ImageSpan, SamplingParams, TokenLogprob
from mmserve.server.schemas.common import Usage
from mmserve.server.state import ServerState

if TYPE_CHECKING:
    from mmserve.engine.client import CompletionDelta


@dataclass(frozen=True)
class GenerationRequest:
    """What goes to the engine: `params.n` answers to each prompt, numbered prompt by prompt.

    `images` are those of the one prompt; several prompts have none.
    """

    request_id: str
    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    owner: str
    images: tuple[ImageSpan, ...] = ()
    cache_salt: str | None = None

    @property
    def num_answers(self) -> int:
        return len(self.prompts) * self.params.n


@dataclass
class Answer:
    """One choice while it grows."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason = "abort"
    stop_reason: str | int | None = None

    def add(self, delta: "CompletionDelta") -> None:
        self.texts.append(delta.text)
        self.logprobs.extend(delta.logprobs)
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    @property
    def text(self) -> str:
        return "".join(self.texts)


class UsageCount:
    """Token counts of a request; a prompt counts once, however many answers it gets."""

    def __init__(self, request: GenerationRequest) -> None:
        self._answers_per_prompt = request.params.n
        self._num_prompt_tokens = sum(len(prompt) for prompt in request.prompts)
        self._num_output_tokens = 0
        self._num_cached_tokens: dict[int, int] = {}

    def add(self, choice: int, delta: "CompletionDelta") -> None:
        self._num_output_tokens += len(delta.token_ids)
        self._num_cached_tokens.setdefault(choice // self._answers_per_prompt, delta.num_cached_tokens)

    def usage(self) -> Usage:
        return Usage.of(
            prompt=self._num_prompt_tokens,
            completion=self._num_output_tokens,
            cached=sum(self._num_cached_tokens.values()),
        )


async def generate(
    state: ServerState, request: GenerationRequest
) -> "AsyncGenerator[tuple[int, CompletionDelta], None]":
    """(choice, delta) as they come, interleaved; closing it aborts what still runs.

    Raises `RequestError` and `EngineError` as the engine does, and `queue_full`.
    """
    with state.gate.admit(request.num_answers, request.owner):
        engine = state.engine_for(request.owner, request.cache_salt)
        streams = [
            engine.generate(
                prompt, request.params, request_id=f"{request.request_id}-{position}", images=request.images
            )
            for position, prompt in enumerate(request.prompts)
        ]
        async with aclosing(_merged(streams)) as deltas:
            async for position, delta in deltas:
                yield position * request.params.n + delta.index, delta


async def collect(state: ServerState, request: GenerationRequest) -> tuple[list[Answer], Usage]:
    """All answers, whole."""
    answers = [Answer() for _ in range(request.num_answers)]
    count = UsageCount(request)
    async with aclosing(generate(state, request)) as deltas:
        async for choice, delta in deltas:
            answers[choice].add(delta)
            count.add(choice, delta)
    return answers, count.usage()


async def _merged(
    streams: "Sequence[AsyncGenerator[CompletionDelta, None]]",
) -> "AsyncGenerator[tuple[int, CompletionDelta], None]":
    """(position of the stream, delta) as they come; one stream alone needs no task and no queue."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as deltas:
            async for delta in deltas:
                yield 0, delta
        return
    queue: asyncio.Queue[tuple[int, CompletionDelta] | None] = asyncio.Queue()

    async def pump(position: int, stream: "AsyncGenerator[CompletionDelta, None]") -> None:
        try:
            async for delta in stream:
                queue.put_nowait((position, delta))
        finally:
            queue.put_nowait(None)

    pumps = [asyncio.create_task(pump(position, stream)) for position, stream in enumerate(streams)]
    try:
        num_open = len(pumps)
        while num_open:
            item = await queue.get()
            if item is not None:
                yield item
                continue
            num_open -= 1
            for task in pumps:
                if task.done():
                    task.result()
    finally:
        await end_all(pumps)
