"""One document on its way through the engine: what every task has in common.

A document that fits the model's context is one part. A longer one is cut into parts of consecutive pages; each is
submitted as soon as it is full, while later pages are still being read. Pages stand in a request between marks, as text
or as pictures; one that cannot be drawn is read by its text. Whoever leaves early takes all requests along.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from mmserve.errors import DocumentError, RequestError
from mmserve.pipelines.answers import Answer, Usage, answer_text, statements
from mmserve.pipelines.checked_text import ReadText, StatementSink
from mmserve.pipelines.chunking import PageText, Part, PartPacker
from mmserve.pipelines.concurrency import end_all
from mmserve.pipelines.document import DocumentReader, DocumentReading
from mmserve.pipelines.engine_protocol import Prompt, Prompts, TextEngine
from mmserve.pipelines.events import OnEvent, RequestFinished, RequestSubmitted, Stage, TextAdded, tell_nobody
from mmserve.pipelines.page_views import PageViews, sends_pictures
from mmserve.pipelines.prompts import FENCE_SLACK_TOKENS, Content, Fence, Wording, takes_system_message
from mmserve.pipelines.repetition import LoopDetector
from mmserve.pipelines.task_options import TaskOptions
from mmserve.request import SamplingParams, StructuredOutput
from mmserve.vision.pages import parse_page_selection

T = TypeVar("T")

_MIN_PART_TOKENS = 64


@dataclass(frozen=True)
class PartRequest:
    """One request. `number` counts from 1 within its stage; 0 is the request that gives the result.

    `max_tokens` of the answer is the work's if None, and less where the context has less room. Pages that cannot be
    drawn are read by their text, unless `needs_pictures`.
    """

    stage: Stage
    number: int
    part: Part
    wording: Wording
    structured: StructuredOutput | None = None
    max_tokens: int | None = None
    needs_pictures: bool = False


@dataclass(frozen=True)
class _Asking:
    prompt: Prompt
    params: SamplingParams
    fence: Fence


class DocumentWork:
    """`reading` has what was read so far, `written` the result's text, `notes` sentences on what went wrong.

    `budget` is what the pages of one request may take, `max_tokens` an answer, both in tokens. Parts of a document are
    asked about in `slots`.
    """

    def __init__(
        self,
        reading: DocumentReading,
        engine: TextEngine,
        prompts: Prompts,
        options: TaskOptions,
        tell: OnEvent,
        *,
        wordings: Iterable[Wording],
        max_tokens: int,
        answer_share: float,
        lengthy_option: str,
    ) -> None:
        self.reading = reading
        self.usage = Usage()
        self.notes: list[str] = []
        self.written = ""
        self.max_tokens = min(options.max_tokens or max_tokens, max(int(engine.max_model_len * answer_share), 1))
        self.slots = asyncio.Semaphore(engine.config.scheduler.max_num_seqs)
        self._engine = engine
        self._prompts = prompts
        self._options = options
        self.tell = tell
        self._has_system = takes_system_message(engine.tokenizer)
        self._wordings = wordings
        self._lengthy_option = lengthy_option
        self._views: PageViews | None = None

    @classmethod
    async def open(
        cls,
        path: Path,
        *,
        engine: TextEngine,
        prompts: Prompts,
        reader: DocumentReader,
        options: TaskOptions,
        name: str | None,
        on_event: OnEvent | None,
        wordings: Iterable[Wording],
        max_tokens: int,
        answer_share: float = 0.25,
        lengthy_option: str = "max_tokens",
    ) -> "DocumentWork":
        """`wordings` are those of all requests to come, which `lengthy_option` may make long; `max_tokens` holds where
        the options say nothing. An answer gets at most `answer_share` of the context.

        Raises `DocumentError` for a document that cannot be read, `RequestError` for options that do not fit it or the
        model.
        """
        document = await reader.open(path, name=name)
        selection = parse_page_selection(options.pages or "1-", document.num_pages)
        tell = on_event or tell_nobody
        takes_pictures = sends_pictures(options.mode, prompts, document)
        reading = DocumentReading(document, selection, reader, tell, takes_pictures=takes_pictures)
        work = cls(
            *(reading, engine, prompts, options, tell),
            wordings=wordings,
            max_tokens=max_tokens,
            answer_share=answer_share,
            lengthy_option=lengthy_option,
        )
        if takes_pictures:
            limits = prompts.limits.narrowed(min_pixels=options.min_pixels, max_pixels=options.max_pixels)
            work._views = PageViews(document, prompts, options.mode, limits, work.budget)
        return work

    @property
    def takes_pictures(self) -> bool:
        return self._views is not None

    async def read(self, answer: Callable[[int, Part], Coroutine[Any, Any, T]]) -> tuple[Part | None, list[T]]:
        """Read all pages. A document that fits one request comes back as its one part, None if there is no page in it.

        Of a longer one, `answer(number, part)` is started for each part as soon as fewer are under way than the engine
        takes at once, and what they return comes back in order. When one of them fails, the others are ended.
        """
        packer = PartPacker(self.budget, self.count_tokens)
        tasks: list[asyncio.Task[T]] = []
        try:
            async with aclosing(self.reading.texts()) as texts:
                async for text in texts:
                    for part in await self._parts_of(text, packer):
                        await self._start(answer, part, tasks)
            self.reading.require_something_read()
            last = packer.finish()
            if not tasks:
                return last, []
            if last is not None:
                await self._start(answer, last, tasks)
            return None, await asyncio.gather(*tasks)
        finally:
            await end_all(tasks)

    async def _start(
        self, answer: Callable[[int, Part], Coroutine[Any, Any, T]], part: Part, tasks: list[asyncio.Task[T]]
    ) -> None:
        await self.slots.acquire()
        for task in tasks:
            if task.done():
                task.result()
        task = asyncio.create_task(answer(len(tasks) + 1, part))
        task.add_done_callback(lambda _task: self.slots.release())
        tasks.append(task)

    async def _parts_of(self, page: PageText, packer: PartPacker) -> list[Part]:
        """The parts that this page closes; a page without text is one of its own, so that what is read has a page."""
        if self._views is None:
            return packer.push(page)
        source = self.reading.reports[-1].source
        try:
            view = await self._views.view(page, source, self.count_tokens(page))
        except DocumentError as error:
            self.notes.append(_undrawn(error))
            return packer.push(page) if page.text else []
        if page.text:
            return packer.push(view)
        before = packer.finish()
        return [*([before] if before else []), Part((view,))]

    async def picture(self, page: int) -> PageText:
        """A page as its picture alone. Raises `DocumentError` for one that cannot be drawn."""
        assert self._views is not None
        return await self._views.view(PageText(page, ""), "none", 0)

    def has_text(self, part: Part) -> bool:
        """Whether there is text to look up in for what the model says of this part's pages."""
        return not set(part.page_numbers).isdisjoint(self.reading.sources.page_numbers)

    async def read_picture(self, request: PartRequest, read: ReadText) -> None:
        """What the model read on a page without text becomes that page's text: it is all there is to look up in."""
        await self.ask(request, read)
        if read.sentences:
            self.reading.sources.add(request.part.first_page, "\n".join(read.sentences), is_quotable=False)

    async def ask(self, request: PartRequest, sink: StatementSink) -> Answer:
        """One request, whose statements go to `sink`; it is ended when that has enough."""
        answer = Answer(usage=self.usage)
        async with self._asking(request) as asking:
            if asking is None:
                return answer
            async with aclosing(statements(self._engine, asking.prompt, asking.params, answer)) as stream:
                async for statement in stream:
                    sink.add(replace(statement, text=asking.fence.without_marks(statement.text)))
                    if sink.has_enough:
                        break
            self.tell(RequestFinished(request.stage, request.number, answer.num_tokens))
        return answer

    async def complete(self, request: PartRequest, loops: LoopDetector | None = None) -> tuple[str, Answer]:
        """One request, and what the model wrote, as it is; of a loop that `loops` finds, the first round."""
        answer, pieces = Answer(usage=self.usage), list[tuple[int, str]]()
        async with self._asking(request) as asking:
            if asking is None:
                return "", answer
            async with aclosing(answer_text(self._engine, asking.prompt, asking.params, answer, loops=loops)) as stream:
                async for text in stream:
                    pieces.append((answer.num_tokens, text))
            self.tell(RequestFinished(request.stage, request.number, answer.num_tokens))
        num_tokens = answer.num_tokens if loops is None else loops.num_tokens_once
        return "".join(text for end, text in pieces if end <= num_tokens), answer

    @asynccontextmanager
    async def _asking(self, request: PartRequest) -> AsyncIterator[_Asking | None]:
        """What goes to the engine, for as long as the block lasts; None where nothing of the part can be shown."""
        async with AsyncExitStack() as stack:
            try:
                prompt, fence = await self._built(request, stack)
            except DocumentError as error:
                if request.needs_pictures or not request.part.has_pictures:
                    raise
                self.notes.append(_undrawn(error))
                readable = self._as_text(request.part)
                if readable is None:
                    yield None
                    return
                prompt, fence = await self._built(replace(request, part=readable), stack)
            room = max(self._engine.max_model_len - len(prompt.token_ids), 1)
            params = self._options.sampling(min(request.max_tokens or self.max_tokens, room))
            part = request.part
            self.tell(RequestSubmitted(request.stage, request.number, part.first_page, part.last_page))
            yield _Asking(prompt, replace(params, structured=request.structured), fence)

    async def _built(self, request: PartRequest, stack: AsyncExitStack) -> tuple[Prompt, Fence]:
        part = request.part
        fence = self.fence([page.text for page in part.texts])
        label = "notes from page" if request.stage == "merge" else "page"
        content: Content = fence.wrap_pictures(part.texts) if part.has_pictures else fence.wrap(part.texts, label=label)
        messages = request.wording.messages(content, has_system=self._has_system)
        return await stack.enter_async_context(self._prompts.build(messages)), fence

    def _as_text(self, part: Part) -> Part | None:
        """The text of a part's pages, from the first on, as far as it fits."""
        packer = PartPacker(self.budget, self.count_tokens)
        for page in self.reading.sources.quotable(part.page_numbers):
            closed = packer.push(PageText(page, self.reading.sources.page(page).text))
            if closed:
                return closed[0]
        return packer.finish()

    def count_tokens(self, page: PageText) -> int:
        """What a page, or notes on one, takes of the budget."""
        marked = self.fence([page.text]).section("notes from page", page)
        num_tokens = len(self._engine.tokenizer.encode(f"{marked}\n\n", parse_special=False))
        return num_tokens if page.picture is None else num_tokens + page.picture.num_tokens

    def fence(self, texts: Sequence[str]) -> Fence:
        return Fence.around(texts, seed=self.reading.document.sha256)

    @cached_property
    def budget(self) -> int:
        """Tokens that pages may take in one request. Raises `RequestError` if there is no room for any."""
        tokenizer, fence = self._engine.tokenizer, self.fence([])
        num_prompt_tokens = max(wording.num_tokens(tokenizer, fence) for wording in self._wordings)
        budget = self._engine.max_model_len - self.max_tokens - num_prompt_tokens - FENCE_SLACK_TOKENS
        if budget >= _MIN_PART_TOKENS:
            return budget
        raise RequestError(
            "context_length_exceeded",
            f"the model's context of {self._engine.max_model_len} tokens leaves no room for pages beside the request of"
            f" {num_prompt_tokens} tokens and the answer: ask for less, for fewer max_tokens, or take a model with a"
            " longer context",
            param=self._lengthy_option,
        )

    def write(self, text: str) -> None:
        """More of the result's text."""
        self.written += text
        self.tell(TextAdded(text))

    def result_fields(self, warnings: Iterable[str]) -> dict[str, Any]:
        """What `DocumentResult` has; `warnings` of the task come first."""
        document = self.reading.document
        return {
            "name": document.name,
            "pages": tuple(self.reading.reports),
            "num_pages": document.num_pages,
            "model": self._engine.config.names[0],
            "usage": self.usage,
            "warnings": (*warnings, *self.notes, *self.reading.warnings()),
            "media_type": document.media_type,
            "sha256": document.sha256,
        }


def _undrawn(error: DocumentError) -> str:
    return f"{error.message}. What text there is was read instead."
