"""What a summary is: its text with citations, where each page's text came from, and what was left out."""

from dataclasses import dataclass
from typing import Any

from mmserve.pipelines.result import Citation, DocumentResult


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
