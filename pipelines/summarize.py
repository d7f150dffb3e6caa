"""A document -> a summary in which every sentence was read on the pages that it cites.

The engine writes, but it is not believed. A document that fits the model's context is one request. A longer one is cut
into parts of consecutive pages; each part is submitted as soon as it is full, while later pages are still being read,
and what was read in the parts is merged, in several rounds if need be.

Whatever the model writes is then looked up sentence by sentence (see `citations`). A sentence that no page supports,
because it has a number or a name that stands nowhere or has them in another connection, is dropped and counted: a
reader who has to rely on the summary is better off with less. Where too little is left, sentences of the document
itself are put in, word for word; the result says how many of both there were. Pages that are blank or could not be read
are named, never made up; without any text the engine is not asked at all.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path

from mmserve.errors import DocumentError, RequestError
from mmserve.pipelines.answers import Answer, Usage, statements
from mmserve.pipelines.checked_text import CheckedText, ReadText
from mmserve.pipelines.chunking import PageText, Part, PartPacker
from mmserve.pipelines.document import DocumentReader, DocumentReading
from mmserve.pipelines.engine_protocol import Prompts, TextEngine
from mmserve.pipelines.events import Done, Event, OnEvent, RequestFinished, RequestSubmitted, Stage, TextAdded
from mmserve.pipelines.page_views import PageViews, sends_pictures
from mmserve.pipelines.prompts import Content, Fence, Length, SummaryPrompt
from mmserve.pipelines.summary import Citation, Summary, answer_warnings
from mmserve.pipelines.task_options import TaskOptions
from mmserve.vision.pages import parse_page_selection

__all__ = ["Citation", "Event", "SummarizeOptions", "Summary", "summarize"]

_MAX_TOKENS: dict[Length, int] = {"short": 160, "medium": 320, "long": 768}
# Fewer sentences than the first are filled up with the document's own; dropped ones are replaced up to the second.
_SENTENCES: dict[Length, tuple[int, int]] = {"short": (2, 3), "medium": (3, 5), "long": (6, 10)}
# An answer is ended when it has more, or when it goes on without anything that can be kept.
_MAX_SENTENCES: dict[Length, int] = {"short": 4, "medium": 8, "long": 20}
_PATIENCE = 6
_MIN_NOTES = 2
_MIN_PART_TOKENS = 64
# The word of a fence may take some tokens more in one request than in another.
_SLACK_TOKENS = 32


@dataclass(frozen=True, kw_only=True)
class SummarizeOptions(TaskOptions):
    """`length` also decides `max_tokens` by default. `language` is that of the summary, by name, the document's own if
    None. `prompt` says what to pay attention to."""

    length: Length = "medium"
    language: str | None = None
    prompt: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length not in _MAX_TOKENS:
            raise RequestError("invalid_request", "length must be short, medium or long", param="length")


async def summarize(
    path: Path,
    *,
    engine: TextEngine,
    prompts: Prompts,
    reader: DocumentReader,
    options: SummarizeOptions,
    name: str | None = None,
    on_event: OnEvent | None = None,
) -> Summary:
    """Read the document at `path` and summarise it; `on_event` hears of progress and gets the text as it is checked.

    `prompts` are those of the engine's model.

    Raises `DocumentError` for a document that cannot be read, `RequestError` for options that do not fit it or the
    model, `EngineError` if the engine cannot answer. Cancelling it aborts all its requests.
    """
    document = await reader.open(path, name=name)
    selection = parse_page_selection(options.pages or "1-", document.num_pages)
    tell = on_event or _tell_nobody
    takes_pictures = sends_pictures(options.mode, prompts, document)
    reading = DocumentReading(document, selection, reader, tell, takes_pictures=takes_pictures)
    summarizer = _Summarizer(reading, engine, prompts, options, tell)
    if takes_pictures:
        summarizer.show_pictures()
    return await summarizer.run()


def _tell_nobody(_event: Event) -> None:
    return None


@dataclass(frozen=True)
class Notes:
    """What was read in some pages."""

    pages: tuple[int, ...]
    sentences: Sequence[str]

    def as_text(self, sentences: Sequence[str]) -> PageText:
        return PageText(self.pages[0], "\n".join(sentences))


class _Summarizer:
    """One document on its way through the engine."""

    def __init__(
        self,
        reading: DocumentReading,
        engine: TextEngine,
        prompts: Prompts,
        options: SummarizeOptions,
        tell: OnEvent,
    ) -> None:
        self._reading = reading
        self._engine = engine
        self._prompts = prompts
        self._views: PageViews | None = None
        self._undrawn: list[str] = []
        self._options = options
        self._tell = tell
        self._usage = Usage()
        self._written: list[str] = []
        self._num_dropped = 0
        self._last_answer = Answer()
        self._tasks: list[asyncio.Task[Notes]] = []
        self._slots = asyncio.Semaphore(engine.config.scheduler.max_num_seqs)
        self._text = self._checked_text(write=self._write)
        self._prompt = SummaryPrompt(options.length, options.language, options.prompt)
        self._max_tokens = min(options.max_tokens or _MAX_TOKENS[options.length], max(engine.max_model_len // 4, 1))
        self._has_system = self._prompt.takes_system_message(engine.tokenizer)
        self._budget = self._part_budget()

    def show_pictures(self) -> None:
        """Have the model see pages as pictures."""
        options = self._options
        limits = self._prompts.limits.narrowed(min_pixels=options.min_pixels, max_pixels=options.max_pixels)
        self._views = PageViews(self._reading.document, self._prompts, options.mode, limits, self._budget)

    async def run(self) -> Summary:
        try:
            await self._read_and_ask()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        self._text.add_notes(self._reading.page_notes())
        self._tell(Done())
        return self._summary()

    async def _read_and_ask(self) -> None:
        packer = PartPacker(self._budget, self._count_tokens)
        async with aclosing(self._reading.texts()) as texts:
            async for text in texts:
                for part in await self._parts_of(text, packer):
                    await self._submit_part(part)
        self._reading.require_something_read()
        last = packer.finish()
        if self._tasks:
            if last is not None:
                await self._submit_part(last)
            await self._merge(await asyncio.gather(*self._tasks))
        elif last is not None:
            await self._write_answer("whole", last)

    async def _parts_of(self, page: PageText, packer: PartPacker) -> list[Part]:
        """The parts that this page closes; a page without text is one of its own, so that what is read has a page."""
        if self._views is None:
            return packer.push(page)
        source = self._reading.reports[-1].source
        try:
            view = await self._views.view(page, source, self._count_tokens(page))
        except DocumentError as error:
            self._undrawn.append(f"{error.message}. What text there is was read instead.")
            return packer.push(page) if page.text else []
        if page.text:
            return packer.push(view)
        before = packer.finish()
        return [*([before] if before else []), Part((view,))]

    async def _submit_part(self, part: Part) -> None:
        """Start a request, as soon as fewer are under way than the engine takes at once."""
        await self._slots.acquire()
        for task in self._tasks:
            if task.done():
                task.result()
        self._tasks.append(asyncio.create_task(self._read_part(part, len(self._tasks) + 1)))

    async def _read_part(self, part: Part, number: int) -> Notes:
        try:
            return await self._take_notes("part", number, part, part.page_numbers)
        finally:
            self._slots.release()

    async def _take_notes(self, stage: Stage, number: int, part: Part, pages: Sequence[int]) -> Notes:
        if stage == "part" and not set(pages) & set(self._reading.sources.page_numbers):
            return await self._read_picture(number, part, pages[0])
        text = self._checked_text(within=pages)
        await self._ask(stage, number, part, text)
        self._num_dropped += text.num_dropped
        await text.add_extracts(_MIN_NOTES - len(text.citations))
        return Notes(tuple(pages), [citation.sentence for citation in text.citations])

    async def _read_picture(self, number: int, part: Part, page: int) -> Notes:
        """What the model read on a page without text becomes that page's text: it is all there is to look up in."""
        read = ReadText()
        await self._ask("part", number, part, read)
        if read.sentences:
            self._reading.sources.add(page, "\n".join(read.sentences), is_quotable=False)
        return Notes((page,), read.sentences)

    async def _merge(self, notes: Sequence[Notes]) -> None:
        """Condense notes until they fit one request, then let that one write the summary."""
        notes = [note for note in notes if note.sentences]
        if not notes:
            return
        while len(groups := self._grouped(notes)) > 1:
            notes = await asyncio.gather(*(self._condense(group, i) for i, group in enumerate(groups, start=1)))
        await self._write_answer("merge", _as_part(groups[0]))

    def _grouped(self, notes: Sequence[Notes]) -> list[list[Notes]]:
        """Consecutive notes that fit one request: three at least, but for the last ones."""
        packer = PartPacker(self._budget, self._count_tokens)
        fitting = [self._shortened(note) for note in notes]
        sizes = [len(part.texts) for text in _as_part(fitting).texts for part in packer.push(text)]
        last = packer.finish()
        sizes += [len(last.texts)] if last else []
        iterator = iter(fitting)
        return [list(itertools.islice(iterator, size)) for size in sizes]

    def _shortened(self, notes: Notes) -> Notes:
        """Notes of a third of a request at most; what they lose is their last sentences."""
        sentences = list(notes.sentences)
        while len(sentences) > 1 and self._count_tokens(notes.as_text(sentences)) > self._budget // 3:
            sentences.pop()
        return Notes(notes.pages, sentences)

    async def _condense(self, group: Sequence[Notes], number: int) -> Notes:
        if len(group) == 1:
            return group[0]
        pages = [page for notes in group for page in notes.pages]
        return await self._take_notes("merge", number, _as_part(group), pages)

    async def _write_answer(self, stage: Stage, part: Part) -> None:
        self._last_answer = await self._ask(stage, 0, part, self._text)
        self._num_dropped += self._text.num_dropped
        await self._text.add_extracts(self._num_wanted_extracts())

    def _num_wanted_extracts(self) -> int:
        """Sentences of the document that make up for what the model dropped, broke off or passed by."""
        fewest, usual = _SENTENCES[self._options.length]
        num_kept = len(self._text.citations)
        if self._options.language is not None and num_kept:
            return 0
        num_lost = self._text.num_dropped + (self._last_answer.is_cut or self._last_answer.has_looped)
        num_missing = max(fewest - num_kept, min(num_lost, usual - num_kept))
        num_pages = len(self._reading.sources.page_numbers)
        is_partial = 2 * len(self._text.cited_pages) < min(num_pages, usual)
        return max(num_missing, usual - num_kept, 2) if is_partial else num_missing

    async def _ask(self, stage: Stage, number: int, part: Part, text: CheckedText | ReadText) -> Answer:
        """One request, whose statements go to `text`. `number` 0 is the request that writes the summary."""
        try:
            return await self._ask_about(stage, number, part, text)
        except DocumentError as error:
            if not part.has_pictures:
                raise
            self._undrawn.append(f"{error.message}. What text there is was read instead.")
            readable = self._as_text(part)
            return (
                Answer(usage=self._usage) if readable is None else await self._ask_about(stage, number, readable, text)
            )

    def _as_text(self, part: Part) -> Part | None:
        """The text of a part's pages, from the first on, as far as it fits."""
        packer = PartPacker(self._budget, self._count_tokens)
        for page in self._reading.sources.quotable(part.page_numbers):
            closed = packer.push(PageText(page, self._reading.sources.page(page).text))
            if closed:
                return closed[0]
        return packer.finish()

    async def _ask_about(self, stage: Stage, number: int, part: Part, text: CheckedText | ReadText) -> Answer:
        fence = self._fence([page.text for page in part.texts])
        content = self._content(stage, part, fence)
        messages = self._prompt.messages(content, is_final=number == 0, has_system=self._has_system)
        answer, most = Answer(usage=self._usage), _MAX_SENTENCES[self._options.length]
        async with self._prompts.build(messages) as prompt:
            room = max(self._engine.max_model_len - len(prompt.token_ids), 1)
            params = self._options.sampling(min(self._max_tokens, room))
            self._tell(RequestSubmitted(stage, number, part.first_page, part.last_page))
            async with aclosing(statements(self._engine, prompt, params, answer)) as stream:
                async for statement in stream:
                    text.add(replace(statement, text=fence.without_marks(statement.text)))
                    if text.num_kept == most or text.num_passed_over == _PATIENCE:
                        break
        self._tell(RequestFinished(stage, number, answer.num_tokens))
        return answer

    def _content(self, stage: Stage, part: Part, fence: Fence) -> Content:
        if part.has_pictures:
            return fence.wrap_pictures(part.texts)
        return fence.wrap(part.texts, label="notes from page" if stage == "merge" else "page")

    def _fence(self, texts: Sequence[str]) -> Fence:
        return Fence.around(texts, seed=self._reading.document.sha256)

    def _count_tokens(self, page: PageText) -> int:
        marked = self._fence([page.text]).section("notes from page", page)
        num_tokens = len(self._engine.tokenizer.encode(f"{marked}\n\n", parse_special=False))
        return num_tokens if page.picture is None else num_tokens + page.picture.num_tokens

    def _part_budget(self) -> int:
        """Tokens that pages may take in one request. Raises `RequestError` if there is no room for any."""
        num_prompt_tokens = self._prompt.num_tokens(self._engine.tokenizer, self._fence([]))
        budget = self._engine.max_model_len - self._max_tokens - num_prompt_tokens - _SLACK_TOKENS
        if budget >= _MIN_PART_TOKENS:
            return budget
        raise RequestError(
            "context_length_exceeded",
            f"the model's context of {self._engine.max_model_len} tokens leaves no room for pages beside prompt and "
            "answer: shorten the prompt, ask for fewer max_tokens, or take a model with a longer context",
            param="prompt" if self._options.prompt else "max_tokens",
        )

    def _checked_text(
        self, *, within: Sequence[int] | None = None, write: Callable[[str], None] = lambda _text: None
    ) -> CheckedText:
        is_translation = self._options.language is not None and within is None
        return CheckedText(self._reading.sources, within=within, is_translation=is_translation, write=write)

    def _write(self, text: str) -> None:
        self._written.append(text)
        self._tell(TextAdded(text))

    def _summary(self) -> Summary:
        document = self._reading.document
        return Summary(
            name=document.name,
            text="".join(self._written),
            citations=tuple(self._text.citations),
            pages=tuple(self._reading.reports),
            num_pages=document.num_pages,
            model=self._engine.config.names[0],
            usage=self._usage,
            num_dropped=self._num_dropped,
            warnings=(
                *answer_warnings(self._text.citations, self._num_dropped, self._last_answer),
                *self._undrawn,
                *self._reading.warnings(),
            ),
            media_type=document.media_type,
            sha256=document.sha256,
        )


def _as_part(notes: Sequence[Notes]) -> Part:
    return Part(tuple(note.as_text(note.sentences) for note in notes))
