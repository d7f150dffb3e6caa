"""Answers of the engine within a job are remembered, so that a job which starts again does not ask for them again."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from sqlalchemy import Connection, select

from mmserve.config import EngineConfig
from mmserve.jobs.database import Database
from mmserve.jobs.digests import digest_of
from mmserve.jobs.tables import answers, jobs
from mmserve.jobs.upserts import put_row
from mmserve.pipelines.engine_protocol import TextDelta, TextEngine, TextTokenizer
from mmserve.request import FinishReason, ImageSpan, SamplingParams

_COMPLETE: tuple[FinishReason, ...] = ("stop", "length")


@dataclass(frozen=True)
class RememberedDelta:
    """A `TextDelta` as it came once."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    num_prompt_tokens: int


class RememberingEngine:
    """A `TextEngine` for one job. What is random without a seed goes to the engine every time.

    An answer that its reader has broken off, because it had enough, is remembered as far as it was read.
    """

    def __init__(self, engine: TextEngine, database: Database, job_id: str, model: str) -> None:
        self._engine = engine
        self._database = database
        self._job_id = job_id
        self._model = model

    @property
    def tokenizer(self) -> TextTokenizer:
        return self._engine.tokenizer

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    @property
    def config(self) -> EngineConfig:
        return self._engine.config

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        images: Sequence[ImageSpan] = (),
    ) -> AsyncGenerator[TextDelta, None]:
        asked = self._engine.generate(prompt_token_ids, params, request_id=request_id, images=images)
        async with aclosing(asked):
            if not params.is_repeatable:
                async for delta in asked:
                    yield delta
                return
            digest = self._digest(prompt_token_ids, params, images)
            known = await self._recall(digest)
            for delta in known:
                yield delta
            if known and known[-1].finish_reason in _COMPLETE:
                return
            async with aclosing(self._ask(asked, digest, known)) as deltas:
                async for delta in deltas:
                    yield delta

    async def _ask(
        self, asked: AsyncGenerator[TextDelta, None], digest: str, known: Sequence[TextDelta]
    ) -> AsyncGenerator[TextDelta, None]:
        """The engine's answer from where the known one ends: to the same question it begins in the same way."""
        rest = _Rest(known)
        told = list(known)
        is_kept = False
        try:
            async for delta in asked:
                new = rest.of(delta)
                if new is None:
                    continue
                told.append(new)
                if new.finish_reason in _COMPLETE:
                    await self._remember(digest, told)
                    is_kept = True
                yield new
        except GeneratorExit:
            await asked.aclose()
            if not is_kept and told and not _is_being_cancelled():
                await self._remember(digest, told)
            raise

    def _digest(self, prompt_token_ids: Sequence[int], params: SamplingParams, images: Sequence[ImageSpan]) -> str:
        pictures = [(image.offset, image.length, image.content_hash) for image in images]
        return digest_of(self._model, prompt_token_ids, params, pictures)

    async def _recall(self, digest: str) -> list[RememberedDelta]:
        query = select(answers.c.answer).where(answers.c.job_id == self._job_id, answers.c.digest == digest)
        stored = await self._database.read(lambda connection: connection.execute(query).scalar_one_or_none())
        return [RememberedDelta(text, tuple(ids), reason, num) for text, ids, reason, num in stored or ()]

    async def _remember(self, digest: str, deltas: Sequence[TextDelta]) -> None:
        answer = [[delta.text, list(delta.token_ids), delta.finish_reason, delta.num_prompt_tokens] for delta in deltas]

        def keep(connection: Connection) -> None:
            # A job that was cancelled or removed meanwhile has no use for it.
            query = select(jobs.c.id).where(jobs.c.id == self._job_id, jobs.c.status == "running")
            if connection.execute(query.with_for_update(read=True)).first() is not None:
                put_row(connection, answers, {"job_id": self._job_id, "digest": digest, "answer": answer})

        await self._database.write(keep)


class _Rest:
    """Cuts from an answer's beginning what is known of it."""

    def __init__(self, known: Sequence[TextDelta]) -> None:
        self._num_characters = sum(len(delta.text) for delta in known)
        self._num_tokens = sum(len(delta.token_ids) for delta in known)

    def of(self, delta: TextDelta) -> TextDelta | None:
        text, token_ids = delta.text[self._num_characters :], delta.token_ids[self._num_tokens :]
        self._num_characters = max(self._num_characters - len(delta.text), 0)
        self._num_tokens = max(self._num_tokens - len(delta.token_ids), 0)
        if not text and not token_ids and delta.finish_reason is None:
            return None
        return RememberedDelta(text, token_ids, delta.finish_reason, delta.num_prompt_tokens)


def _is_being_cancelled() -> bool:
    """An answer broken off by a cancelled task says nothing about where its reader had enough."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
