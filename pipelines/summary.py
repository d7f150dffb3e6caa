"""What a summary is: its text with citations, where each page's text came from, and what was left out."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mmserve.pipelines.answers import Answer
from mmserve.pipelines.result import Citation, DocumentResult, num_sentences


@dataclass(frozen=True, kw_only=True)
class Summary(DocumentResult):
    """A document's summary.

    `text` has a mark such as [p. 3] after each sentence, and names pages that are blank or could not be read.
    `num_dropped` counts sentences of the model that no page supports; they are not in `text`.
    """

    text: str
    citations: tuple[Citation, ...]
    num_dropped: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "object": "summary",
            "name": self.name,
            "text": self.text,
            "citations": [citation.to_dict() for citation in self.citations],
            "num_dropped": self.num_dropped,
            **self.reading_dict(),
        }

    def to_markdown(self) -> str:
        return self.as_markdown(self.text, "summarised")


def answer_warnings(citations: Sequence[Citation], num_dropped: int, answer: Answer) -> list[str]:
    """Sentences about what became of the model's answer."""
    origins = Counter(citation.origin for citation in citations)
    num_uncited = sum(not citation.pages for citation in citations)
    warnings = []
    if num_dropped:
        warnings.append(f"Left out, because no page supports them: {num_sentences(num_dropped)} of the model.")
    if origins["document"]:
        warnings.append(f"Taken from the document word for word: {num_sentences(origins['document'])}.")
    if num_uncited:
        warnings.append(
            f"Without a citation, because there is nothing to look up in them: {num_sentences(num_uncited)}."
        )
    if answer.has_looped:
        warnings.append("The model began to repeat itself, and its answer was ended there.")
    elif answer.is_cut:
        warnings.append("The model's answer reached max_tokens; its unfinished last sentence was left out.")
    return warnings
