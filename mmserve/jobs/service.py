"""Files, jobs and results of one server: what its routes use, and what works in the background."""

from types import TracebackType
from typing import Protocol, Self

from mmserve.jobs.files import FileStore
from mmserve.jobs.results import ResultCache
from mmserve.jobs.settings import JobSettings
from mmserve.jobs.store import JobStore
from mmserve.pipelines.document import DocumentReader
from mmserve.pipelines.engine_protocol import Prompts, TextEngine


class Workplace(Protocol):
    """What it takes to do a document, for each owner.

    `model` is all about the server that may change an answer: weights, precision, how pages are read.
    """

    @property
    def reader(self) -> DocumentReader: ...

    @property
    def model(self) -> str: ...

    def engine_for(self, owner: str) -> TextEngine: ...

    def prompts_for(self, owner: str) -> Prompts: ...


class JobService:
    """Entering it brings the database up to date and starts work; leaving it stops work, for the next start to go on.

    Raises `SetupError` or `StorageError` where the database cannot be had.
    """

    files: FileStore
    jobs: JobStore
    results: ResultCache

    def __init__(self, settings: JobSettings, workplace: Workplace) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        raise NotImplementedError

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        raise NotImplementedError
