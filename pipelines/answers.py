"""One request to the engine: its answer as text or statement by statement, ended early where it loops."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from mmserve.errors import EngineError
from mmserve.pipelines.engine_protocol import Prompt, TextEngine
from mmserve.pipelines.repetition import LoopDetector
from mmserve.pipelines.sentences import Statement, StatementStream
from mmserve.request import SamplingParams


@dataclass
class Usage:
    """Tokens of all requests together."""

    prompt_tokens: int = 0
    completion_tokens: int = 0

    def to_dict(self) -> dict[str, int]:
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
        }


@dataclass
class Answer:
    """How one request went; complete once it was read to the end."""

    num_tokens: int = 0
    is_cut: bool = False
    has_looped: bool = False
    usage: Usage = field(default_factory=Usage)


async def answer_text(
    engine: TextEngine, prompt: Prompt, params: SamplingParams, answer: Answer, *, loops: LoopDetector | None = None
) -> AsyncGenerator[str, None]:
    """The answer's text as it comes; `answer` is filled on the way. Closing it aborts the request.

    `loops` says what counts as a loop, which ends the answer. Raises `EngineError` and `RequestError` as the engine
    does.
    """
    loops = loops or LoopDetector()
    answer.usage.prompt_tokens += len(prompt.token_ids)
    async with aclosing(engine.generate(prompt.token_ids, params, images=prompt.images)) as deltas:
        async for delta in deltas:
            answer.num_tokens += len(delta.token_ids)
            answer.usage.completion_tokens += len(delta.token_ids)
            answer.is_cut = delta.finish_reason == "length"
            if delta.finish_reason in ("abort", "error"):
                raise EngineError("internal_error", "the request was ended before its answer was complete")
            yield delta.text
            # Rows of a table may be the same; what has a form ends by it, or at max_tokens.
            if params.structured is None and loops.push(delta.token_ids):
                answer.has_looped = True
                break


async def statements(
    engine: TextEngine, prompt: Prompt, params: SamplingParams, answer: Answer
) -> AsyncGenerator[Statement, None]:
    """The same as whole statements, each as soon as it is complete."""
    stream = StatementStream()
    async with aclosing(answer_text(engine, prompt, params, answer)) as texts:
        async for text in texts:
            for statement in stream.push(text):
                yield statement
    for statement in stream.finish(is_cut=answer.is_cut or answer.has_looped):
        yield statement
