"""What the results of all tasks have in common: sentences with citations, and how the document was read."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mmserve.pipelines.answers import Answer, Usage
from mmserve.pipelines.events import PageReport

Origin = Literal["model", "document"]


@dataclass(frozen=True)
class Citation:
    """A sentence of a result, without marks, and the pages on which it was read.

    `origin` tells a sentence that the model wrote from one that was taken from the document word for word. `pages` is
    empty only for a sentence in another language than the document that names nothing to look up.
    """

    sentence: str
    pages: tuple[int, ...]
    origin: Origin

    @property
    def marked(self) -> str:
        return " ".join([self.sentence, *(f"[p. {page}]" for page in self.pages)])

    def to_dict(self) -> dict[str, Any]:
        return {"sentence": self.sentence, "pages": list(self.pages), "origin": self.origin}


@dataclass(frozen=True, kw_only=True)
class DocumentResult:
    """What is said of every document: `pages` are those that were asked for, of the document's `num_pages`."""

    name: str
    pages: tuple[PageReport, ...]
    num_pages: int
    model: str
    usage: Usage
    warnings: tuple[str, ...]
    media_type: str
    sha256: str

    def reading_dict(self) -> dict[str, Any]:
        """How the document was read, and by what."""
        return {
            "pages": [page.to_dict() for page in self.pages],
            "num_pages": self.num_pages,
            "model": self.model,
            "usage": self.usage.to_dict(),
            "warnings": list(self.warnings),
            "media_type": self.media_type,
            "sha256": self.sha256,
        }

    def as_markdown(self, body: str, done: str) -> str:
        """Name, `body`, and in small what a reader should know about it; `done` is such as `summarised`."""
        pages = "1 page" if self.num_pages == 1 else f"{self.num_pages} pages"
        lines = [f"# {' '.join(self.name.split())}", "", body, ""]
        lines += [f"> {warning}" for warning in self.warnings]
        lines += [""] if self.warnings else []
        return "\n".join([*lines, f"*{pages}, {done} by {self.model}.*", ""])


def answer_warnings(citations: Sequence[Citation], num_dropped: int, answer: Answer) -> list[str]:
    """Sentences about what became of the model's answer."""
    origins = Counter(citation.origin for citation in citations)
    num_uncited = sum(not citation.pages for citation in citations)
    warnings = []
    if num_dropped:
        warnings.append(f"Left out, because no page supports them: {_num_sentences(num_dropped)} of the model.")
    if origins["document"]:
        warnings.append(f"Taken from the document word for word: {_num_sentences(origins['document'])}.")
    if num_uncited:
        warnings.append(
            f"Without a citation, because there is nothing to look up in them: {_num_sentences(num_uncited)}."
        )
    if answer.has_looped:
        warnings.append("The model began to repeat itself, and its answer was ended there.")
    elif answer.is_cut:
        warnings.append("The model's answer reached max_tokens; its unfinished last sentence was left out.")
    return warnings


def _num_sentences(count: int) -> str:
    return "1 sentence" if count == 1 else f"{count} sentences"
