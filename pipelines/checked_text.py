"""From a model's statements to a text whose every sentence was read somewhere."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

from mmserve.pipelines.citations import CitationFinder, Claim
from mmserve.pipelines.extracts import choose_extracts
from mmserve.pipelines.repetition import Novelty
from mmserve.pipelines.result import Citation
from mmserve.pipelines.sentences import Statement, clean_statement
from mmserve.pipelines.sources import Sources

# An answer is ended when this many statements in a row bring nothing that can be kept.
_PATIENCE = 6
# Fewer are no sentence that can be looked up by itself.
MIN_TERMS = 3


class StatementSink:
    """Takes an answer's statements one by one; `num_passed_over` have come since the last one that was kept."""

    def __init__(self, max_statements: int) -> None:
        self.num_passed_over = 0
        self._max_statements = max_statements

    @property
    def num_kept(self) -> int:
        raise NotImplementedError

    @property
    def has_enough(self) -> bool:
        """Whether what the model goes on to say is not needed any more."""
        return self.num_kept >= self._max_statements or self.num_passed_over >= _PATIENCE

    def add(self, statement: Statement) -> None:
        raise NotImplementedError

    def _says_something(self, statement: Statement) -> bool:
        """Whether it is worth a look: no heading, and no line that only leads on to others."""
        return not _is_heading(statement)


class CheckedText(StatementSink):
    """Keeps the statements that pages support; `write` gets the text as it grows.

    `num_dropped` statements were supported by no page. With `is_translation`, a statement that has nothing to look up
    is kept without a citation.
    """

    # `The tenant pays.` and `1. Repair` say too little; an item such as `Rent: £1,875` does not.
    _min_terms: ClassVar[int] = MIN_TERMS

    def __init__(
        self,
        sources: Sources,
        *,
        max_statements: int,
        within: Sequence[int] | None = None,
        is_translation: bool = False,
        write: Callable[[str], None] = lambda _text: None,
    ) -> None:
        super().__init__(max_statements)
        self.citations: list[Citation] = []
        self.num_dropped = 0
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
        is_new = self._kept.is_new(text) and self._dropped.is_new(text)
        if not is_new or not self._says_something(statement):
            return
        pages = self._pages_of(statement)
        is_kept = bool(pages) or (self._is_translation and self._finder.is_beyond_checking(text))
        if is_kept and self._says_too_little(statement):
            return
        if is_kept:
            self.append(Citation(text, pages, "model"), is_item=statement.is_item)
        else:
            self._dropped.remember(text)
            self.num_dropped += 1

    def _pages_of(self, statement: Statement) -> tuple[int, ...]:
        return self._finder.find(statement.text)

    def _says_too_little(self, statement: Statement) -> bool:
        is_entry = statement.is_item and any(term.kind == "number" for term in Claim(statement.text).terms)
        return not is_entry and num_terms(statement.text) < self._min_terms

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
            self.append(Citation(text, (extract.page,), "document"), is_item=not ends_as_sentence(text))

    def add_notes(self, notes: Sequence[str]) -> None:
        """Sentences about the document itself, in a paragraph of their own."""
        if notes:
            self._write(("\n\n" if self.citations else "") + " ".join(notes))

    def append(self, citation: Citation, *, is_item: bool = False) -> None:
        """Keep a sentence that was looked up already; `is_item` gives it a line of its own."""
        separator = ("\n" if is_item else " ") if is_item == self._is_in_list else "\n\n"
        self._write(f"{separator if self.citations else ''}{'- ' if is_item else ''}{citation.marked}")
        self.citations.append(citation)
        self._kept.remember(citation.sentence)
        self._is_in_list = is_item
        self.num_passed_over = 0


class ReadText(StatementSink):
    """Keeps what says something new of a page that nothing can be looked up in."""

    def __init__(self, max_statements: int) -> None:
        super().__init__(max_statements)
        self.sentences: list[str] = []
        self._kept = Novelty()

    @property
    def num_kept(self) -> int:
        return len(self.sentences)

    def add(self, statement: Statement) -> None:
        self.num_passed_over += 1
        if not self._says_something(statement) or not self._kept.is_new(statement.text):
            return
        self._kept.remember(statement.text)
        self.sentences.append(statement.text)
        self.num_passed_over = 0


def ends_as_sentence(text: str) -> bool:
    return text.rstrip("\"'”’»)]")[-1:] in tuple(".!?…。！？")


def num_terms(text: str) -> int:
    """How many different things a statement claims."""
    return len({term.key for term in Claim(text).terms})


def _is_heading(statement: Statement) -> bool:
    """A line that is no sentence and no item of a list, or that only leads on to others: `Here is a summary:`."""
    is_content = statement.is_item or ends_as_sentence(statement.text)
    claim = Claim(statement.text)
    return not is_content or not claim.terms or (statement.text.endswith(":") and not claim.anchors)
