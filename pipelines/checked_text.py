"""From a model's statements to a text whose every sentence was read somewhere."""

from collections.abc import Callable, Collection, Sequence

from mmserve.pipelines.citations import CitationFinder, Claim
from mmserve.pipelines.extracts import choose_extracts
from mmserve.pipelines.repetition import Novelty
from mmserve.pipelines.sentences import Statement
from mmserve.pipelines.sources import Sources
from mmserve.pipelines.summary import Citation


class CheckedText:
    """Takes statements one by one and keeps those that pages support; `write` gets the text as it grows.

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
        self._sources = sources
        self._within = within
        self._finder = CitationFinder(sources, within)
        self._kept, self._dropped = Novelty(), Novelty()
        self._is_translation = is_translation
        self._write = write
        self._starts_line = False

    def add(self, statement: Statement) -> None:
        """Keep the statement with its citation, or drop it. What says nothing, or nothing new, is passed over."""
        self._starts_line = self._starts_line or statement.starts_line
        text = statement.text
        if _is_heading(text) or not (self._kept.is_new(text) and self._dropped.is_new(text)):
            return
        pages = self._finder.find(text)
        is_kept = bool(pages) or (self._is_translation and self._finder.is_beyond_checking(text))
        if is_kept:
            self._append(Citation(text, pages, "model"), is_item=statement.is_item)
        else:
            self._dropped.remember(text)
            self.num_dropped += 1

    def add_extracts(self, count: int) -> None:
        """Up to `count` sentences of the pages, word for word, from pages not cited yet where it can be."""
        extracts = choose_extracts(
            self._sources, count, novelty=self._kept, cited_pages=self._cited_pages(), within=self._within
        )
        for extract in extracts:
            self._append(Citation(extract.text, (extract.page,), "document"), is_item=False)

    def add_notes(self, notes: Sequence[str]) -> None:
        """Sentences about the document itself, in a paragraph of their own."""
        if notes:
            self._write(("\n\n" if self.citations else "") + " ".join(notes))

    def _cited_pages(self) -> Collection[int]:
        return [page for citation in self.citations for page in citation.pages]

    def _append(self, citation: Citation, *, is_item: bool) -> None:
        separator = "" if not self.citations else "\n" if self._starts_line or is_item else " "
        self._write(f"{separator}{'- ' if is_item else ''}{citation.marked}")
        self.citations.append(citation)
        self._kept.remember(citation.sentence)
        self._starts_line = False


def _is_heading(text: str) -> bool:
    """A line that only leads on to others, such as `Here is a summary:`."""
    claim = Claim(text)
    return not claim.terms or (text.endswith(":") and not claim.anchors)
