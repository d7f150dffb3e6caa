"""A reader of text pages and an engine by script, which say what they did; and a service made of them."""

import asyncio
import hashlib
import re
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from text_fakes import Delta, ScriptedTextEngine, TextPrompts

from mmserve.errors import MMServeError
from mmserve.jobs.database import Database
from mmserve.jobs.records import Job, JobEvent, StoredFile
from mmserve.jobs.service import JobService
from mmserve.jobs.settings import JobSettings
from mmserve.pipelines.events import OnEvent
from mmserve.pipelines.tasks import TaskName
from mmserve.request import SamplingParams
from mmserve.vision.page_types import Document, Page, PageForm, PageOptions

TOWNS = ("Vienna", "Lisbon", "Geneva", "Warsaw", "Dublin", "Madrid", "Athens", "Prague", "Berne", "Oslo")


def document_text(num_pages: int, *, title: str = "treaty") -> str:
    """Pages with a sentence each that can be cited, and some that cannot fit a request together."""
    return "\f".join(
        f"The {title} was signed in {TOWNS[page % len(TOWNS)]} in {1800 + page} by all parties.\n"
        + "\n".join(f"Article {page}{line} says what clause {page}{line} means for the parties." for line in range(5))
        for page in range(1, num_pages + 1)
    )


def first_sentences(prompt: str) -> str:
    """What a model might answer: the sentences of the pages that can be cited."""
    return " ".join(re.findall(r"The \w+ was signed in \w+ in \d+ by all parties\.", prompt)[:3])


@dataclass
class CountingEngine(ScriptedTextEngine):
    """`failures` are raised first, one a request; answers about what is `hanging` never end."""

    answer: Callable[[str], str] = first_sentences
    max_model_len: int = 500
    max_num_seqs: int = 4
    hanging: set[str] = field(default_factory=lambda: {"obstacle"})
    failures: list[Exception] = field(default_factory=list)
    on_request: Callable[[], None] = lambda: None

    def hangs_at(self, prompt: str) -> bool:
        return any(word in prompt for word in self.hanging)

    def _deltas(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> AsyncGenerator[Delta, None]:
        self.on_request()
        if self.failures:
            raise self.failures.pop(0)
        return super()._deltas(prompt_token_ids, params)


@dataclass
class CountingReader:
    """Reads text files whose pages end with a form feed; `read` has the pages, `problems` those that fail."""

    options: PageOptions = field(default_factory=PageOptions)
    delay: float = 0.0
    read: list[int] = field(default_factory=list)
    problems: dict[int, MMServeError] = field(default_factory=dict)
    on_page: Callable[[int], None] = lambda _number: None

    async def open(self, path: Path, *, name: str | None = None) -> Document:
        content = await asyncio.to_thread(path.read_bytes)
        num_pages = content.count(b"\f") + 1
        return Document(path, name or path.name, "application/pdf", hashlib.sha256(content).hexdigest(), num_pages)

    async def pages(
        self, document: Document, selection: Sequence[int] | None = None, *, form: PageForm = "text"
    ) -> AsyncGenerator[Page, None]:
        texts = document.path.read_text().split("\f")
        for number in selection if selection is not None else range(1, len(texts) + 1):
            await asyncio.sleep(self.delay)
            self.read.append(number)
            yield (
                Page(number, problem=self.problems[number])
                if number in self.problems
                else Page(number, texts[number - 1], "ocr", width=10.0, height=20.0, notes=(f"Read by OCR: {number}.",))
            )
            self.on_page(number)


@dataclass
class Desk:
    """A `Workplace`; `engines` are those of owners who have one of their own."""

    reader: CountingReader = field(default_factory=CountingReader)
    engine: CountingEngine = field(default_factory=CountingEngine)
    model: str = "scripted-1"
    is_ready: bool = True
    engines: dict[str, CountingEngine] = field(default_factory=dict)

    def engine_for(self, owner: str) -> CountingEngine:
        return self.engines.get(owner, self.engine)

    def watched(self, task: TaskName, on_event: OnEvent) -> AbstractContextManager[OnEvent]:
        return nullcontext(on_event)

    def prompts_for(self, owner: str) -> TextPrompts:
        return TextPrompts(self.engine_for(owner).tokenizer)


class Clock:
    """The time of day, which can be moved on."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead


@dataclass
class Office:
    """A data folder and a database, and services on them."""

    folder: Path
    url: str
    clock: Clock = field(default_factory=Clock)
    desk: Desk = field(default_factory=Desk)

    def service(self, desk: Desk | None = None, **settings: Any) -> JobService:
        chosen = JobSettings(data_dir=self.folder / "data", database_url=self.url, **settings)
        return JobService(chosen, desk or self.desk, database=self.database())

    def database(self) -> Database:
        return Database(self.url, clock=self.clock)

    async def add(
        self, service: JobService, text: str | bytes, *, owner: str = "anna", name: str = "treaty.pdf"
    ) -> StoredFile:
        content = text.encode() if isinstance(text, str) else text
        source = self.folder / "upload"
        source.write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        num_pages = content.count(b"\f") + 1
        return await service.files.add(
            owner, source, filename=name, media_type="application/pdf", num_pages=num_pages, sha256=digest
        )


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.005)


async def ended(service: JobService, job: Job) -> Job:
    """The job, when it has ended."""
    await events_of(service, job)
    return await service.jobs.get(job.owner, job.id)


async def events_of(service: JobService, job: Job, after: int = 0) -> list[JobEvent]:
    return [event async for event in service.jobs.events(job.owner, job.id, after)]


def text_of(events: Sequence[JobEvent], index: int = 0) -> str:
    """What a follower has on the screen."""
    text = ""
    for event in events:
        if event.data.get("index") != index:
            continue
        if event.event == "delta":
            text += event.data["text"]
        elif event.data.get("event") == "restarted":
            text = ""
    return text
