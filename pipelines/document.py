"""A file's pages on their way into a pipeline: read one after the other, reported, and kept as text only."""

from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Protocol

from mmserve.errors import DocumentError
from mmserve.pipelines.chunking import PageText
from mmserve.pipelines.events import DocumentOpened, OnEvent, PageRead, PageReport
from mmserve.pipelines.sentences import page_sentences
from mmserve.pipelines.sources import Sources
from mmserve.vision.page_types import Document, Page, PageForm


class DocumentReader(Protocol):
    """What pipelines ask of `vision.pages.PageReader`."""

    async def open(self, path: Path, *, name: str | None = None) -> Document: ...

    def pages(
        self, document: Document, selection: Sequence[int] | None = None, *, form: PageForm = "text"
    ) -> AsyncIterator[Page]: ...


class DocumentReading:
    """One pass over the pages `numbers` of a document. Their text is in `sources`, what became of each in `reports`.

    With `takes_pictures`, pages that are not blank but have no text come as well.
    """

    def __init__(
        self,
        document: Document,
        numbers: Sequence[int],
        reader: DocumentReader,
        tell: OnEvent,
        *,
        takes_pictures: bool = False,
    ) -> None:
        self.document = document
        self.numbers = numbers
        self.sources = Sources()
        self.reports: list[PageReport] = []
        self._reader = reader
        self._tell = tell
        self._takes_pictures = takes_pictures
        self._pictured: set[int] = set()

    async def pages(self, form: PageForm = "text") -> AsyncGenerator[Page, None]:
        """All pages, as soon as each is read."""
        self._tell(DocumentOpened(self.document.name, len(self.numbers)))
        pages = self._reader.pages(self.document, self.numbers, form=form)
        try:
            async for page in pages:
                self.reports.append(PageReport.of(page))
                self._tell(PageRead(self.reports[-1], len(self.reports), len(self.numbers)))
                yield page
        finally:
            if isinstance(pages, AsyncGenerator):
                await pages.aclose()

    async def texts(self) -> AsyncGenerator[PageText, None]:
        """Pages that have text. Lines that the layout broke are whole again."""
        async with aclosing(self.pages()) as pages:
            async for page in pages:
                if page.problem is not None or page.is_blank:
                    continue
                if page.text.strip():
                    self.sources.add(page.number, page.text)
                    yield PageText(page.number, "\n".join(page_sentences(page.text)))
                elif self._takes_pictures:
                    self._pictured.add(page.number)
                    yield PageText(page.number, "")

    def require_something_read(self) -> None:
        """Raises `DocumentError` if no page has text and there is another reason than that they are blank."""
        if self._pictured or self.sources.page_numbers or all(report.is_blank for report in self.reports):
            return
        name, problems = self.document.name, [report.problem for report in self.reports if report.problem]
        if len({problem.code for problem in problems}) == 1 and len(problems) == len(self.reports):
            raise DocumentError(problems[0].code, problems[0].message).about(name)
        reason = problems[0].message if problems else "OCR found no text; is it switched off?"
        raise DocumentError("empty_document", f"{name}: no text could be read: {reason}")

    @property
    def _known_pages(self) -> set[int]:
        return {*self.sources.page_numbers, *self._pictured}

    def page_notes(self) -> list[str]:
        """Sentences that name the pages without text, neighbours with the same lack together."""
        blank = [report.number for report in self.reports if report.is_blank]
        silent = [
            report.number
            for report in self.reports
            if not report.is_blank and report.problem is None and report.number not in self._known_pages
        ]
        notes = _about(blank, "is blank", "are blank") + _about(silent, "has no text", "have no text")
        for report in self.reports:
            if report.problem is not None:
                reason = report.problem.message.rstrip(".")
                notes.append(f"Page {report.number} could not be read: {reason}.")
        return notes

    def warnings(self) -> list[str]:
        """What a reader should know about the document beside what it says."""
        unchecked = _about(self._pictured, "was read from its picture alone", "were read from their pictures alone")
        return [*reading_notes(self.document, self.reports), *unchecked]


def reading_notes(document: Document, reports: Sequence[PageReport]) -> list[str]:
    """Notes on a document, on its pages, and on what is attached to it."""
    page_notes = [f"Page {report.number}: {note}" for report in reports for note in report.notes]
    attachments = [f"Attached to the document and not read: {', '.join(document.attachments)}."]
    return [*document.notes, *page_notes, *(attachments if document.attachments else [])]


def _about(numbers: Collection[int], singular: str, plural: str) -> list[str]:
    """`Page 4 is blank.`, `Pages 7-9 are blank.`"""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [f"Page {run[0]} {singular}." if len(run) == 1 else f"Pages {run[0]}-{run[-1]} {plural}." for run in runs]
