"""The samples are what their README says."""

import asyncio
from pathlib import Path

import pytest

from mmserve.pipelines.schemas import Schema
from mmserve.vision.pages import Page, PageLimits, PageReader

SAMPLES = Path(__file__).parents[2] / "samples"
KINDS = {
    "invoice.pdf": ("application/pdf", ["text_layer"]),
    "annual-report.pdf": ("application/pdf", ["text_layer"] * 5 + ["none"] + ["text_layer"] * 6),
    "scanned-letter.jpg": ("image/jpeg", ["ocr"]),
    "receipt.png": ("image/png", ["ocr"]),
    "lift-repair.tiff": ("image/tiff", ["ocr"] * 3),
    "soil-table.pdf": ("application/pdf", ["text_layer"]),
    "lease-mixed.pdf": ("application/pdf", ["text_layer", "text_layer", "ocr", "ocr", "text_layer"]),
    "protokoll-deutsch.pdf": ("application/pdf", ["text_layer"] * 2),
}
PASSAGES = {
    "invoice.pdf": {1: ["Kestrel Instrument Works Ltd", "£4,933.20"]},
    "annual-report.pdf": {1: ["48,600 homes"], 7: ["Tomasz Zielinski"], 12: ["201 votes"]},
    "scanned-letter.jpg": {1: ["43 slipped", "£67,400", "Canon Peter Aldous"]},
    "receipt.png": {1: ["59.47", "14/06/2025"]},
    "lift-repair.tiff": {1: ["R-5530"], 2: ["DLS-44"], 3: ["£407.00"]},
    "soil-table.pdf": {1: ["Quarry Piece", "74.2"]},
    "lease-mixed.pdf": {1: ["£1,875"], 3: ["Meter reading 48210"], 4: ["£2,300"], 5: ["Yvonne Castellan"]},
    "protokoll-deutsch.pdf": {1: ["Sabine Köhler"], 2: ["12.900 Euro"]},
}


async def _read(reader: PageReader, name: str) -> tuple[str, list[Page]]:
    document = await reader.open(SAMPLES / name)
    return document.media_type, [page async for page in reader.pages(document)]


@pytest.fixture(scope="module")
def read() -> dict[str, tuple[str, list[Page]]]:
    async def read_all() -> dict[str, tuple[str, list[Page]]]:
        async with PageReader(limits=PageLimits(page_timeout=240)) as reader:
            return {name: await _read(reader, name) for name in KINDS}

    return asyncio.run(read_all())


def test_the_sample_schema_is_one_and_described() -> None:
    schema = Schema.of((SAMPLES / "invoice.schema.json").read_text())
    assert schema.root["required"] == ["vendor", "invoice_date", "total"]
    assert "`invoice.schema.json`" in (SAMPLES / "README.md").read_text()


def test_all_samples_are_described_and_small() -> None:
    files = [path for path in SAMPLES.iterdir() if path.suffix not in {".md", ".json"}]
    assert {path.name for path in files} == set(KINDS)
    assert sum(path.stat().st_size for path in files) < 3_000_000
    readme = (SAMPLES / "README.md").read_text()
    assert all(f"`{name}`" in readme for name in KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_a_sample_is_of_its_kind(name: str, read: dict[str, tuple[str, list[Page]]]) -> None:
    media_type, pages = read[name]
    assert (media_type, [page.source for page in pages]) == KINDS[name]
    assert [page.number for page in pages if page.is_blank] == ([6] if name == "annual-report.pdf" else [])
    assert not any(page.problem for page in pages)


@pytest.mark.parametrize("name", PASSAGES)
def test_what_stands_on_a_sample_is_read(name: str, read: dict[str, tuple[str, list[Page]]]) -> None:
    texts = {page.number: page.text for page in read[name][1]}
    for number, passages in PASSAGES[name].items():
        assert all(passage in texts[number] for passage in passages), texts[number]
