"""A reader of given pages, and tasks over them by a scripted engine."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from text_fakes import ScriptedTextEngine, TextPrompts

from mmserve.pipelines.ask import AnswerResult, AskOptions, ask
from mmserve.pipelines.engine_protocol import Prompts
from mmserve.pipelines.events import OnEvent
from mmserve.pipelines.extract import ExtractionResult, ExtractOptions, extract
from mmserve.pipelines.summarize import SummarizeOptions, summarize
from mmserve.pipelines.summary import Summary
from mmserve.pipelines.task_options import TaskOptions
from mmserve.vision.page_types import Document, Page, PageForm


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


R = TypeVar("R")


def answer_of(
    question: str,
    document: Sequence[str | Page] | GivenPages,
    engine: ScriptedTextEngine,
    on_event: OnEvent | None = None,
    prompts: Prompts | None = None,
    **options: Any,
) -> AnswerResult:
    return result_of(ask, AskOptions(question=question, **options), document, engine, on_event, prompts)


def extraction_of(
    document: Sequence[str | Page] | GivenPages,
    engine: ScriptedTextEngine,
    on_event: OnEvent | None = None,
    prompts: Prompts | None = None,
    **options: Any,
) -> ExtractionResult:
    return result_of(extract, ExtractOptions(**options), document, engine, on_event, prompts)


def summary_of(
    document: Sequence[str | Page] | GivenPages,
    engine: ScriptedTextEngine,
    on_event: OnEvent | None = None,
    **options: Any,
) -> Summary:
    return result_of(summarize, SummarizeOptions(**options), document, engine, on_event)


def result_of(
    task: Callable[..., Coroutine[Any, Any, R]],
    options: TaskOptions,
    document: Sequence[str | Page] | GivenPages,
    engine: ScriptedTextEngine,
    on_event: OnEvent | None = None,
    prompts: Prompts | None = None,
) -> R:
    return asyncio.run(
        task(
            Path("minutes.pdf"),
            engine=engine,
            prompts=prompts or TextPrompts(engine.tokenizer),
            reader=document if isinstance(document, GivenPages) else GivenPages(document),
            options=options,
            on_event=on_event,
        )
    )


def answering(*answers: str, **settings: Any) -> ScriptedTextEngine:
    """An engine that gives these answers in order, then the last one again."""
    rest = list(answers)
    return ScriptedTextEngine(lambda _prompt: rest.pop(0) if len(rest) > 1 else rest[0], **settings)
