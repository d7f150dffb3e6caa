"""What a summary is: its text with citations, where each page's text came from, and what was left out."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mmserve.pipelines.answers import Answer, Usage
from mmserve.pipelines.events import PageReport

Origin = Literal["model", "document"]


@dataclass(frozen=True)
class Citation:
    """A sentence of the summary, without marks, and the pages on which it was read.

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
class Summary:
    """A document's summary.

    `text` has a mark such as [p. 3] after each sentence, and names pages that are blank or could not be read.
    `num_dropped` counts sentences of the model that no page supports; they are not in `text`. `pages` are those that
    were asked for, of the document's `num_pages`.
    """

    name: str
    text: str
    citations: tuple[Citation, ...]
    pages: tuple[PageReport, ...]
    num_pages: int
    model: str
    usage: Usage
    num_dropped: int
    warnings: tuple[str, ...]
    media_type: str
    sha256: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "object": "summary",
            "name": self.name,
            "text": self.text,
            "citations": [citation.to_dict() for citation in self.citations],
            "pages": [page.to_dict() for page in self.pages],
            "num_pages": self.num_pages,
            "model": self.model,
            "usage": self.usage.to_dict(),
            "num_dropped": self.num_dropped,
            "warnings": list(self.warnings),
            "media_type": self.media_type,
            "sha256": self.sha256,
        }

    def to_markdown(self) -> str:
        """Name, text, and in small what a reader should know about it."""
        pages = "1 page" if self.num_pages == 1 else f"{self.num_pages} pages"
        lines = [f"# {' '.join(self.name.split())}", "", self.text, ""]
        lines += [f"> {warning}" for warning in self.warnings]
        lines += [""] if self.warnings else []
        return "\n".join([*lines, f"*{pages}, summarised by {self.model}.*", ""])


def answer_warnings(citations: Sequence[Citation], num_dropped: int, answer: Answer) -> list[str]:
    """Sentences about what became of the model's answer."""
    origins = Counter(citation.origin for citation in citations)
    num_uncited = sum(not citation.pages for citation in citations)
    warnings = []
    if num_dropped:
        warnings.append(f"Left out, because no page supports them: {_sentences(num_dropped)} of the model.")
    if origins["document"]:
        warnings.append(f"Taken from the document word for word: {_sentences(origins['document'])}.")
    if num_uncited:
        warnings.append(f"Without a citation, because there is nothing to look up in them: {_sentences(num_uncited)}.")
    if answer.has_looped:
        warnings.append("The model began to repeat itself, and its answer was ended there.")
    elif answer.is_cut:
        warnings.append("The model's answer reached max_tokens; its unfinished last sentence was left out.")
    return warnings


def _sentences(count: int) -> str:
    return "1 sentence" if count == 1 else f"{count} sentences"
