"""What a pipeline tells while it works: for a progress bar, or as server-sent events."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from mmserve.errors import MMServeError
from mmserve.vision.page_types import Page, TextSource

Stage = Literal["whole", "part", "merge"]
# Text that a model read off a page's picture has the source vision.
PageSource = TextSource | Literal["vision"]


@dataclass(frozen=True)
class PageReport:
    """What was read of a page. `notes` are sentences about it; `problem` says why it could not be read."""

    number: int
    source: PageSource
    is_blank: bool
    problem: MMServeError | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, page: Page) -> "PageReport":
        return cls(page.number, page.source, page.is_blank, page.problem, page.notes)

    def to_dict(self) -> dict[str, Any]:
        problem = None if self.problem is None else {"code": self.problem.code, "message": self.problem.message}
        return {
            "number": self.number,
            "source": self.source,
            "is_blank": self.is_blank,
            "problem": problem,
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class DocumentOpened:
    """`num_pages` are to be read."""

    kind: ClassVar[str] = "document_opened"
    name: str
    num_pages: int

    def to_dict(self) -> dict[str, Any]:
        return {"num_pages": self.num_pages}


@dataclass(frozen=True)
class PageRead:
    kind: ClassVar[str] = "page_read"
    page: PageReport
    num_read: int
    num_pages: int

    def to_dict(self) -> dict[str, Any]:
        return {"page": self.page.to_dict(), "num_read": self.num_read, "num_pages": self.num_pages}


@dataclass(frozen=True)
class RequestSubmitted:
    """The engine was asked about the pages `first_page` to `last_page`; `part` counts from 1 within its stage."""

    kind: ClassVar[str] = "request_submitted"
    stage: Stage
    part: int
    first_page: int
    last_page: int

    def to_dict(self) -> dict[str, Any]:
        return {"stage": self.stage, "part": self.part, "pages": [self.first_page, self.last_page]}


@dataclass(frozen=True)
class RequestFinished:
    kind: ClassVar[str] = "request_finished"
    stage: Stage
    part: int
    num_output_tokens: int

    def to_dict(self) -> dict[str, Any]:
        return {"stage": self.stage, "part": self.part, "num_output_tokens": self.num_output_tokens}


@dataclass(frozen=True)
class TextAdded:
    """More of the result's text, checked already: all of these joined are the text of the result."""

    kind: ClassVar[str] = "text_added"
    text: str

    def to_dict(self) -> dict[str, Any]:
        return {"text": self.text}


@dataclass(frozen=True)
class Done:
    kind: ClassVar[str] = "done"

    def to_dict(self) -> dict[str, Any]:
        return {}


Event = DocumentOpened | PageRead | RequestSubmitted | RequestFinished | TextAdded | Done
OnEvent = Callable[[Event], None]


def stream_data(event: Event) -> tuple[Literal["delta", "progress"], dict[str, Any]] | None:
    """Name and data of an event as streams tell it; None for the end, of which each stream tells in its own way."""
    if isinstance(event, Done):
        return None
    if isinstance(event, TextAdded):
        return "delta", event.to_dict()
    return "progress", {"event": event.kind, **event.to_dict()}


def tell_nobody(_event: Event) -> None:
    return None
