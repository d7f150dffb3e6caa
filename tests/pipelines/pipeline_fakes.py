"""An engine that answers by script and a reader of given pages, for the pipelines."""

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmserve.config import EngineConfig, SchedulerConfig
from mmserve.pipelines.ask import AnswerResult, AskOptions, ask
from mmserve.pipelines.engine_protocol import Prompts, TextTokenizer
from mmserve.pipelines.events import Event
from mmserve.pipelines.extract import ExtractionResult, ExtractOptions, extract
from mmserve.pipelines.summarize import SummarizeOptions, summarize
from mmserve.pipelines.summary import Summary
from mmserve.request import FinishReason, ImageSpan, SamplingParams
from mmserve.vision.image_source import ImageSource, PixelLimits
from mmserve.vision.page_types import Document, Page, PageForm


class WordTokenizer:
    """A token is a word or a run of spaces; a chat is its roles and contents."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def encode(self, text: str, *, add_special_tokens: bool = False, parse_special: bool = True) -> list[int]:
        return [self._ids.setdefault(piece, len(self._ids)) for piece in re.findall(r"\S+|\s+", text)]

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **template_kwargs: Any
    ) -> list[int]:
        return self.encode("\n".join(f"<{message['role']}> {message['content']}" for message in messages))

    def decode(self, ids: Sequence[int]) -> str:
        pieces = list(self._ids)
        return "".join(pieces[token_id] for token_id in ids)


@dataclass(frozen=True)
class Delta:
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    num_prompt_tokens: int


@dataclass
class ScriptedTextEngine:
    """Answers a prompt with `answer(prompt)`, a word a token; with `hangs` it never ends an answer."""

    answer: Callable[[str], str] = lambda _prompt: "Nothing."
    max_model_len: int = 2000
    max_num_seqs: int = 8
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
        ids = self.tokenizer.encode(self.answer(self.prompts[-1]))
        is_cut = params.max_tokens is not None and len(ids) > params.max_tokens
        for place, token_id in enumerate(ids := ids[: params.max_tokens]):
            await asyncio.sleep(0)
            is_last = place == len(ids) - 1 and not self.hangs
            reason: FinishReason | None = ("length" if is_cut else "stop") if is_last else None
            yield Delta(self.tokenizer.decode([token_id]), (token_id,), reason, len(prompt_token_ids))
        if self.hangs:
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


@dataclass
class GivenPages:
    """A reader of one document with these pages; a text is a page with a text layer, "" a blank one."""

    given: Sequence[str | Page]
    num_read: int = 0
    is_closed: bool = False
    attachments: tuple[str, ...] = ()

    async def open(self, path: Path, *, name: str | None = None) -> Document:
        return Document(path, name or path.name, "application/pdf", "ab" * 32, len(self.given), self.attachments)

    async def pages(
        self, document: Document, selection: Sequence[int] | None = None, *, form: PageForm = "text"
    ) -> AsyncIterator[Page]:
        try:
            for number in selection or range(1, len(self.given) + 1):
                await asyncio.sleep(0)
                self.num_read += 1
                yield self._page(number)
        finally:
            self.is_closed = True

    def _page(self, number: int) -> Page:
        page = self.given[number - 1]
        if isinstance(page, Page):
            return page
        return Page(number, page, "text_layer" if page else "none", is_blank=not page)


def answer_of(
    question: str,
    document: Sequence[str | Page] | GivenPages,
    engine: ScriptedTextEngine,
    on_event: Callable[[Event], None] | None = None,
    prompts: Prompts | None = None,
    **options: Any,
) -> AnswerResult:
    reader = document if isinstance(document, GivenPages) else GivenPages(document)
    return asyncio.run(
        ask(
            Path("minutes.pdf"),
            engine=engine,
            prompts=prompts or TextPrompts(engine.tokenizer),
            reader=reader,
            options=AskOptions(question=question, **options),
            on_event=on_event,
        )
    )


def extraction_of(
    document: Sequence[str | Page] | GivenPages,
    engine: ScriptedTextEngine,
    on_event: Callable[[Event], None] | None = None,
    prompts: Prompts | None = None,
    **options: Any,
) -> ExtractionResult:
    reader = document if isinstance(document, GivenPages) else GivenPages(document)
    return asyncio.run(
        extract(
            Path("minutes.pdf"),
            engine=engine,
            prompts=prompts or TextPrompts(engine.tokenizer),
            reader=reader,
            options=ExtractOptions(**options),
            on_event=on_event,
        )
    )


def summary_of(
    document: Sequence[str | Page] | GivenPages,
    engine: ScriptedTextEngine,
    on_event: Callable[[Event], None] | None = None,
    **options: Any,
) -> Summary:
    reader = document if isinstance(document, GivenPages) else GivenPages(document)
    return asyncio.run(
        summarize(
            Path("minutes.pdf"),
            engine=engine,
            prompts=TextPrompts(engine.tokenizer),
            reader=reader,
            options=SummarizeOptions(**options),
            on_event=on_event,
        )
    )


def answering(*answers: str, **settings: Any) -> ScriptedTextEngine:
    """An engine that gives these answers in order, then the last one again."""
    rest = list(answers)
    return ScriptedTextEngine(lambda _prompt: rest.pop(0) if len(rest) > 1 else rest[0], **settings)
