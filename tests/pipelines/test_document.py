import asyncio
from pathlib import Path

from pipeline_fakes import GivenPages

from mmserve.errors import DocumentError
from mmserve.pipelines.chunking import PageText
from mmserve.pipelines.document import DocumentReading
from mmserve.pipelines.events import Event
from mmserve.vision.page_types import Page

WRAPPED = "The trust supplies drinking water to 48,600 homes\nin nine parishes of the valley.\nNext year brings more."


def read(reader: GivenPages, tell: list[Event]) -> tuple[DocumentReading, list[PageText]]:
    async def run() -> tuple[DocumentReading, list[PageText]]:
        document = await reader.open(Path("a.pdf"))
        reading = DocumentReading(document, list(range(1, document.num_pages + 1)), reader, tell.append)
        return reading, [text async for text in reading.texts()]

    return asyncio.run(run())


def test_pages_come_as_text_with_whole_lines_and_are_reported() -> None:
    events: list[Event] = []
    bad = Page(3, problem=DocumentError("timeout", "too slow"))
    noted = Page(4, "Four.", "ocr", notes=("hidden text was left out",))
    reading, texts = read(GivenPages([WRAPPED, "", bad, noted], attachments=("x.zip",)), events)
    whole = "The trust supplies drinking water to 48,600 homes in nine parishes of the valley.\nNext year brings more."
    assert texts == [PageText(1, whole), PageText(4, "Four.")]
    assert [report.source for report in reading.reports] == ["text_layer", "none", "none", "ocr"]
    assert reading.page_notes() == ["Page 2 is blank.", "Page 3 could not be read: too slow."]
    assert reading.warnings() == ["Page 4: hidden text was left out", "Attached to the document and not read: x.zip."]
    assert [event.kind for event in events] == ["document_opened"] + ["page_read"] * 4


def test_leaving_early_closes_the_reader() -> None:
    reader = GivenPages(["One.", "Two.", "Three."])

    async def run() -> None:
        document = await reader.open(Path("a.pdf"))
        texts = DocumentReading(document, [1, 2, 3], reader, lambda _event: None).texts()
        assert (await anext(texts)).number == 1
        await texts.aclose()

    asyncio.run(run())
    assert reader.is_closed
    assert reader.num_read == 1
