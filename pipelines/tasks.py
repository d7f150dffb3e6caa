"""What can be done with a document: each task's name, its options, and the function that does it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol

from mmserve.errors import RequestError
from mmserve.pipelines.ask import AskOptions, ask
from mmserve.pipelines.document import DocumentReader
from mmserve.pipelines.engine_protocol import Prompts, TextEngine
from mmserve.pipelines.events import OnEvent, PageReport
from mmserve.pipelines.extract import ExtractOptions, extract
from mmserve.pipelines.summarize import SummarizeOptions, summarize
from mmserve.pipelines.task_options import TaskOptions
from mmserve.pipelines.transcribe import TranscribeOptions, transcribe

TaskName = Literal["summarize", "ask", "extract", "transcribe"]


class TaskResult(Protocol):
    """What a task makes of a document: a frozen dataclass that can be pickled and written as JSON or Markdown."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def name(self) -> str: ...

    @property
    def pages(self) -> Sequence[PageReport]: ...

    def to_dict(self) -> dict[str, Any]: ...

    def to_markdown(self) -> str: ...


class TaskFunction(Protocol):
    """`options` are of the task's own type. Raises and is cancelled as `summarize` is."""

    async def __call__(
        self,
        path: Path,
        *,
        engine: TextEngine,
        prompts: Prompts,
        reader: DocumentReader,
        options: Any,
        name: str | None = None,
        on_event: OnEvent | None = None,
    ) -> TaskResult: ...


@dataclass(frozen=True)
class Task:
    options_type: type[TaskOptions]
    run: TaskFunction

    def options(self, values: Mapping[str, Any]) -> TaskOptions:
        """The options of these names, as they came from JSON. Raises `RequestError` naming the one at fault."""
        known = {field.name for field in fields(self.options_type)}
        unknown = sorted(values.keys() - known)
        if unknown:
            raise RequestError("invalid_request", f"there is no option {unknown[0]!r} here", param=unknown[0])
        for name, value in values.items():
            if isinstance(value, str) and not _is_text(value):
                raise RequestError("invalid_request", f"{name} has bytes that are no text in UTF-8", param=name)
        try:
            return self.options_type(**values)
        except TypeError as error:
            raise RequestError("invalid_request", f"the options do not fit: {error}") from None


def _is_text(value: str) -> bool:
    """A command line has halves of surrogate pairs for bytes that it could not read."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


TASKS: Mapping[TaskName, Task] = MappingProxyType(
    {
        "summarize": Task(SummarizeOptions, summarize),
        "ask": Task(AskOptions, ask),
        "extract": Task(ExtractOptions, extract),
        "transcribe": Task(TranscribeOptions, transcribe),
    }
)
