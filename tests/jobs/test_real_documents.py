"""Jobs with the real reader of pages: a text and a PDF, whose pages are read once."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from job_fakes import CountingEngine, Office, ended
from reportlab.pdfgen.canvas import Canvas
from text_fakes import TextPrompts

from mmserve.jobs.service import JobService
from mmserve.jobs.settings import JobSettings
from mmserve.jobs.workplace import Workplace
from mmserve.pipelines.events import OnEvent
from mmserve.pipelines.tasks import TaskName
from mmserve.vision.page_types import Document, Page, PageForm, PageOptions
from mmserve.vision.pages import PageReader

pytest_plugins = ["job_fixtures"]


class WatchedReader(PageReader):
    def __init__(self) -> None:
        super().__init__(options=PageOptions(ocr="off"), num_workers=1)
        self.read: list[int] = []

    async def pages(
        self, document: Document, selection: Sequence[int] | None = None, *, form: PageForm = "text"
    ) -> AsyncGenerator[Page]:
        async for page in super().pages(document, selection, form=form):
            self.read.append(page.number)
            yield page


@dataclass
class RealDesk:
    reader: PageReader
    engine: CountingEngine = field(default_factory=CountingEngine)
    model: str = "scripted-1"
    is_ready: bool = True

    def engine_for(self, owner: str) -> CountingEngine:
        return self.engine

    def watched(self, task: TaskName, on_event: OnEvent) -> AbstractContextManager[OnEvent]:
        return nullcontext(on_event)

    def prompts_for(self, owner: str) -> TextPrompts:
        return TextPrompts(self.engine.tokenizer)


def make_pdf(path: Path) -> bytes:
    canvas = Canvas(str(path), invariant=True)
    for year in (1801, 1802):
        canvas.drawString(72, 700, f"The treaty was signed in Vienna in {year} by all parties.")
        canvas.showPage()
    canvas.save()
    return path.read_bytes()


@pytest.mark.parametrize("name", ["treaty.txt", "treaty.pdf"])
def test_a_real_document_is_read_once_for_two_jobs(sqlite_office: Office, tmp_path: Path, name: str) -> None:
    sentence = "The treaty was signed in Vienna in 1801 by all parties."
    content = make_pdf(tmp_path / "made.pdf") if name.endswith(".pdf") else f"{sentence}\n".encode()

    async def scenario() -> None:
        async with WatchedReader() as reader:
            assert isinstance(reader, WatchedReader)
            desk: Workplace = RealDesk(reader)
            settings = JobSettings(data_dir=tmp_path / "data")
            async with JobService(settings, desk) as service:
                file = await sqlite_office.add(service, content, name=name)
                results = []
                for length in ("short", "long"):
                    job, _ = await service.jobs.create("anna", "summarize", [file.id], {"length": length})
                    done = await ended(service, job)
                    assert (done.status, done.error) == ("done", None)
                    results.append((done.results or [{}])[0])
            assert reader.read == [page["number"] for page in results[0]["pages"]]
        assert results[0]["pages"] == results[1]["pages"]
        assert all(sentence in result["text"] for result in results)

    asyncio.run(scenario())
