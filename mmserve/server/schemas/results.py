"""What the tasks answer. Results are made by the pipelines; these models tell `/docs` what is in them."""

from collections.abc import Sequence
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from mmserve.pipelines.events import PageSource
from mmserve.server.schemas.common import ErrorBody

Result = TypeVar("Result", bound=BaseModel)


class PageProblem(BaseModel):
    code: str
    message: str


class PageResult(BaseModel):
    """What was read of a page."""

    number: int
    source: PageSource = Field(
        description="Where its text came from; none for a page without text, vision where the model wrote it down."
    )
    is_blank: bool
    problem: PageProblem | None
    notes: list[str]


class TokenUsage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CitationResult(BaseModel):
    sentence: str
    pages: list[int]
    origin: Literal["model", "document"]


class DocumentResult(BaseModel):
    """What every task says of its document."""

    name: str
    pages: Sequence[PageResult]
    num_pages: int
    model: str
    usage: TokenUsage
    warnings: list[str]
    media_type: str
    sha256: str
    cached: bool = Field(description="Whether the answer was known from an equal request before.")


_READING: dict[str, Any] = {
    "name": "invoice.pdf",
    "pages": [{"number": 1, "source": "text_layer", "is_blank": False, "problem": None, "notes": []}],
    "num_pages": 1,
    "model": "smollm2-135m",
    "usage": {"prompt_tokens": 212, "completion_tokens": 14, "total_tokens": 226},
    "warnings": [],
    "media_type": "application/pdf",
    "sha256": "8d5e957f297893487bd98fa830fa6413e9b0f2c6e1a1b1a0a3b2b8a4c8a7a1f0",
    "cached": False,
}


def _example(**own: Any) -> ConfigDict:
    return ConfigDict(json_schema_extra={"example": {**_READING, **own}})


class SummaryResult(DocumentResult):
    model_config = _example(
        object="summary",
        text="The total is 1,284.50 EUR. [p. 1]",
        citations=[{"sentence": "The total is 1,284.50 EUR.", "pages": [1], "origin": "model"}],
        num_dropped=0,
    )

    object: Literal["summary"]
    text: str = Field(description="The summary, each sentence with marks of its pages.")
    citations: list[CitationResult]
    num_dropped: int = Field(description="Sentences of the model that no page supports; they are not in the text.")


class AnswerResult(DocumentResult):
    model_config = _example(
        object="answer",
        question="When is the total due?",
        text="It is due on 12 March. [p. 1]",
        citations=[{"sentence": "It is due on 12 March.", "pages": [1], "origin": "model"}],
        found=True,
        num_dropped=0,
    )

    object: Literal["answer"]
    question: str
    text: str = Field(description="The answer, each sentence with marks of its pages.")
    citations: list[CitationResult]
    found: bool = Field(description="Whether the document answers the question; if not, the text says so.")
    num_dropped: int = Field(description="Statements of the model that no page supports; they are not in the text.")


class ExtractedValue(BaseModel):
    path: str = Field(description="Where in the data it stands, as a JSON pointer.")
    value: Any
    pages: list[int]
    verified: bool = Field(description="Whether the pages say it.")


class ExtractionResult(DocumentResult):
    model_config = _example(
        object="extraction",
        data={"vendor": "Hallam Pumps", "date": None, "total": "1,284.50 EUR"},
        values=[
            {"path": "/vendor", "value": "Hallam Pumps", "pages": [1], "verified": True},
            {"path": "/total", "value": "1,284.50 EUR", "pages": [1], "verified": True},
        ],
        valid=True,
    )

    object: Literal["extraction"]
    data: Any = Field(description="What was asked for; null where the document does not say.")
    values: list[ExtractedValue]
    valid: bool = Field(description="Whether the data fits the schema; if not, a warning says where.")


_MARKDOWN = "# Invoice 42\n\n| Item | Price |\n| --- | --- |\n| Pump | 1,284.50 |"


class TranscriptPage(PageResult):
    markdown: str


class TranscriptResult(DocumentResult):
    model_config = _example(
        object="transcript",
        text=f"<!-- page 1 -->\n\n{_MARKDOWN}",
        pages=[{**_READING["pages"][0], "markdown": _MARKDOWN}],
    )

    object: Literal["transcript"]
    text: str = Field(description="Markdown, page by page, each under a comment with its number.")
    pages: Sequence[TranscriptPage]


class FailedDocument(BaseModel):
    """In the place of a result, where several documents were sent."""

    name: str
    error: ErrorBody


class ResultList(BaseModel, Generic[Result]):
    """Results of several documents, in their order."""

    object: Literal["list"]
    data: list[Result | FailedDocument]
