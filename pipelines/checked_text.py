"""From a model's statements to a text whose every sentence was read somewhere."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from mmserve.pipelines.citations import CitationFinder, Claim
from mmserve.pipelines.extracts import choose_extracts
from mmserve.pipelines.repetition import Novelty
from mmserve.pipelines.result import Citation
from mmserve.pipelines.sentences import Statement, clean_statement
from mmserve.pipelines.sources import Sources

# `The tenant pays.` and `1. Repair` say too little; an item such as `Rent: £1,875` does not.
_MIN_TERMS = 3


class CheckedText:
    """Takes statements one by one and keeps those that pages support; `write` gets the text as it grows.

    `num_dropped` statements were supported by no page, `num_passed_over` have come since the last one that was kept.

    With `is_translation`, a statement that has nothing to look up is kept without a citation.
    """

    def __init__(
        self,
        sources: Sources,
        *,
        within: Sequence[int] | None = None,
        is_translation: bool = False,
        write: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self.citations: list[Citation] = []
        self.num_dropped = 0
        self.num_passed_over = 0
        self._sources = sources
        self._within = within
        self._finder = CitationFinder(sources, within)
        self._kept, self._dropped = Novelty(), Novelty()
        self._is_translation = is_translation
        self._write = write
        self._is_in_list = False

    @property
    def num_kept(self) -> int:
        return len(self.citations)

    @property
    def cited_pages(self) -> set[int]:
        return {page for citation in self.citations for page in citation.pages}

    def add(self, statement: Statement) -> None:
        """Keep the statement with its citation, or drop it. What says nothing, or nothing new, is passed over."""
        text = statement.text
        self.num_passed_over += 1
        if _is_heading(statement) or not (self._kept.is_new(text) and self._dropped.is_new(text)):
            return
        pages = self._finder.find(text)
        is_kept = bool(pages) or (self._is_translation and self._finder.is_beyond_checking(text))
        if is_kept and _says_too_little(statement):
            return
        if is_kept:
            self._append(Citation(text, pages, "model"), is_item=statement.is_item)
        else:
            self._dropped.remember(text)
            self.num_dropped += 1

    async def add_extracts(self, count: int) -> None:
        """Up to `count` sentences of the pages, word for word, from pages not cited yet where it can be."""
        choose = partial(
            choose_extracts,
            self._sources,
            count,
            novelty=self._kept,
            cited_pages=self.cited_pages,
            within=self._within,
        )
        # All pages are gone through: in a thread, so that the event loop goes on.
        for extract in await asyncio.to_thread(choose):
            text = clean_statement(extract.text)
            self._append(Citation(text, (extract.page,), "document"), is_item=not _ends_as_sentence(text))

    def add_notes(self, notes: Sequence[str]) -> None:
        """Sentences about the document itself, in a paragraph of their own."""
        if notes:
            self._write(("\n\n" if self.citations else "") + " ".join(notes))

    def _append(self, citation: Citation, *, is_item: bool) -> None:
        separator = ("\n" if is_item else " ") if is_item == self._is_in_list else "\n\n"
        self._write(f"{separator if self.citations else ''}{'- ' if is_item else ''}{citation.marked}")
        self.citations.append(citation)
        self._kept.remember(citation.sentence)
        self._is_in_list = is_item
        self.num_passed_over = 0


class ReadText:
    """Takes statements about a page that nothing can be looked up in, and keeps what says something new."""

    def __init__(self) -> None:
        self.sentences: list[str] = []
        self.num_passed_over = 0
        self._kept = Novelty()

    @property
    def num_kept(self) -> int:
        return len(self.sentences)

    def add(self, statement: Statement) -> None:
        self.num_passed_over += 1
        if _is_heading(statement) or not self._kept.is_new(statement.text):
            return
        self._kept.remember(statement.text)
        self.sentences.append(statement.text)
        self.num_passed_over = 0


def _ends_as_sentence(text: str) -> bool:
    return text.rstrip("\"'”’»)]")[-1:] in tuple(".!?…。！？")


def _says_too_little(statement: Statement) -> bool:
    terms = Claim(statement.text).terms
    is_entry = statement.is_item and any(term.kind == "number" for term in terms)
    return not is_entry and len({term.key for term in terms}) < _MIN_TERMS


def _is_heading(statement: Statement) -> bool:
    """A line that is no sentence and no item of a list, or that only leads on to others: `Here is a summary:`."""
    is_content = statement.is_item or _ends_as_sentence(statement.text)
    claim = Claim(statement.text)
    return not is_content or not claim.terms or (statement.text.endswith(":") and not claim.anchors)
