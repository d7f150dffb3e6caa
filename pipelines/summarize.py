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

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mmserve.errors import RequestError
from mmserve.pipelines.answers import Answer
from mmserve.pipelines.checked_text import CheckedText, ReadText
from mmserve.pipelines.chunking import PageText, Part, PartPacker
from mmserve.pipelines.concurrency import together
from mmserve.pipelines.document import DocumentReader
from mmserve.pipelines.document_work import DocumentWork, PartRequest
from mmserve.pipelines.engine_protocol import Prompts, TextEngine
from mmserve.pipelines.events import Done, OnEvent, Stage
from mmserve.pipelines.prompts import Length, SummaryPrompt
from mmserve.pipelines.result import answer_warnings
from mmserve.pipelines.summary import Summary
from mmserve.pipelines.task_options import TaskOptions

_MAX_TOKENS: dict[Length, int] = {"short": 160, "medium": 320, "long": 768}
# Fewer sentences than the first are filled up with the document's own; dropped ones are replaced up to the second.
_SENTENCES: dict[Length, tuple[int, int]] = {"short": (2, 3), "medium": (3, 5), "long": (6, 10)}
# An answer is ended when it has more.
_MAX_SENTENCES: dict[Length, int] = {"short": 4, "medium": 8, "long": 20}
_MIN_NOTES = 2


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
    prompt = SummaryPrompt(options.length, options.language, options.prompt)
    work = await DocumentWork.open(
        path,
        engine=engine,
        prompts=prompts,
        reader=reader,
        options=options,
        name=name,
        on_event=on_event,
        wordings=[prompt.wording(is_final=True)],
        max_tokens=_MAX_TOKENS[options.length],
        lengthy_option="prompt" if options.prompt else "max_tokens",
    )
    return await _Summarizer(work, options, prompt).run()


@dataclass(frozen=True)
class Notes:
    """What was read in some pages."""

    pages: tuple[int, ...]
    sentences: Sequence[str]

    def as_text(self, sentences: Sequence[str]) -> PageText:
        return PageText(self.pages[0], "\n".join(sentences))


class _Summarizer:
    """What was read in the parts of one document becomes one text."""

    def __init__(self, work: DocumentWork, options: SummarizeOptions, prompt: SummaryPrompt) -> None:
        self._work = work
        self._options = options
        self._prompt = prompt
        self._num_dropped = 0
        self._last_answer = Answer()
        self._text = self._checked_text(write=work.write)

    async def run(self) -> Summary:
        whole, notes = await self._work.read(self._read_part)
        if whole is not None:
            await self._write_answer("whole", whole)
        await self._merge(notes)
        self._text.add_notes(self._work.reading.page_notes())
        self._work.tell(Done())
        return self._summary()

    async def _read_part(self, number: int, part: Part) -> Notes:
        if self._work.has_text(part):
            return await self._take_notes("part", number, part, part.page_numbers)
        request = self._request("part", number, part)
        read = ReadText(self._max_statements)
        await self._work.read_picture(request, read)
        return Notes((part.first_page,), read.sentences)

    async def _take_notes(self, stage: Stage, number: int, part: Part, pages: Sequence[int]) -> Notes:
        text = self._checked_text(within=pages)
        await self._ask(stage, number, part, text)
        await text.add_extracts(_MIN_NOTES - len(text.citations))
        return Notes(tuple(pages), [citation.sentence for citation in text.citations])

    async def _merge(self, notes: Sequence[Notes]) -> None:
        """Condense notes until they fit one request, then let that one write the summary."""
        notes = [note for note in notes if note.sentences]
        if not notes:
            return
        while len(groups := self._grouped(notes)) > 1:
            notes = await together(self._condense(group, i) for i, group in enumerate(groups, start=1))
        await self._write_answer("merge", _as_part(groups[0]))

    def _grouped(self, notes: Sequence[Notes]) -> list[list[Notes]]:
        """Consecutive notes that fit one request: three at least, but for the last ones."""
        packer = PartPacker(self._work.budget, self._work.count_tokens)
        fitting = [self._shortened(note) for note in notes]
        sizes = [len(part.texts) for text in _as_part(fitting).texts for part in packer.push(text)]
        last = packer.finish()
        sizes += [len(last.texts)] if last else []
        iterator = iter(fitting)
        return [list(itertools.islice(iterator, size)) for size in sizes]

    def _shortened(self, notes: Notes) -> Notes:
        """Notes of a third of a request at most; what they lose is their last sentences."""
        sentences = list(notes.sentences)
        while len(sentences) > 1 and self._work.count_tokens(notes.as_text(sentences)) > self._work.budget // 3:
            sentences.pop()
        return Notes(notes.pages, sentences)

    async def _condense(self, group: Sequence[Notes], number: int) -> Notes:
        if len(group) == 1:
            return group[0]
        pages = [page for notes in group for page in notes.pages]
        return await self._take_notes("merge", number, _as_part(group), pages)

    async def _write_answer(self, stage: Stage, part: Part) -> None:
        self._last_answer = await self._ask(stage, 0, part, self._text)
        await self._text.add_extracts(self._num_wanted_extracts())

    def _num_wanted_extracts(self) -> int:
        """Sentences of the document that make up for what the model dropped, broke off or passed by."""
        fewest, usual = _SENTENCES[self._options.length]
        num_kept = len(self._text.citations)
        if self._options.language is not None and num_kept:
            return 0
        num_lost = self._text.num_dropped + (self._last_answer.is_cut or self._last_answer.has_looped)
        num_missing = max(fewest - num_kept, min(num_lost, usual - num_kept))
        num_pages = len(self._work.reading.sources.page_numbers)
        is_partial = 2 * len(self._text.cited_pages) < min(num_pages, usual)
        return max(num_missing, usual - num_kept, 2) if is_partial else num_missing

    async def _ask(self, stage: Stage, number: int, part: Part, text: CheckedText) -> Answer:
        answer = await self._work.ask(self._request(stage, number, part), text)
        self._num_dropped += text.num_dropped
        return answer

    def _request(self, stage: Stage, number: int, part: Part) -> PartRequest:
        return PartRequest(stage, number, part, self._prompt.wording(is_final=number == 0))

    @property
    def _max_statements(self) -> int:
        return _MAX_SENTENCES[self._options.length]

    def _checked_text(
        self, *, within: Sequence[int] | None = None, write: Callable[[str], None] = lambda _text: None
    ) -> CheckedText:
        is_translation = self._options.language is not None and within is None
        return CheckedText(
            self._work.reading.sources,
            max_statements=self._max_statements,
            within=within,
            is_translation=is_translation,
            write=write,
        )

    def _summary(self) -> Summary:
        citations = tuple(self._text.citations)
        return Summary(
            text=self._work.written,
            citations=citations,
            num_dropped=self._num_dropped,
            **self._work.result_fields(answer_warnings(citations, self._num_dropped, self._last_answer)),
        )


def _as_part(notes: Sequence[Notes]) -> Part:
    return Part(tuple(note.as_text(note.sentences) for note in notes))
