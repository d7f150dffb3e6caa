"""What a transcript is: a document's pages as Markdown, each with where its text came from."""

from dataclasses import dataclass
from typing import Any

from mmserve.pipelines.events import PageReport
from mmserve.pipelines.result import DocumentResult


@dataclass(frozen=True)
class TranscribedPage(PageReport):
    """`markdown` is empty for a page that is blank or could not be read."""

    markdown: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "markdown": self.markdown}

    @property
    def marked(self) -> str:
        """The page under its mark, a comment that no reader of Markdown shows."""
        if self.markdown:
            return f"<!-- page {self.number} -->\n\n{self.markdown}"
        return f"<!-- page {self.number}, {'blank' if self.is_blank else 'not read'} -->"


@dataclass(frozen=True, kw_only=True)
class Transcript(DocumentResult):
    """`text` is all pages' Markdown in order, each under its mark."""

    text: str
    pages: tuple[TranscribedPage, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"object": "transcript", "name": self.name, "text": self.text, **self.reading_dict()}

    def to_markdown(self) -> str:
        """The text between comments: the document's name before it, and behind it what a reader should know."""
        lines = [_comment(self.name), self.text, *(_comment(f"note: {warning}") for warning in self.warnings)]
        return "\n\n".join(lines) + "\n"


def _comment(text: str) -> str:
    return f"<!-- {' '.join(text.split()).replace('--', '- -')} -->"
