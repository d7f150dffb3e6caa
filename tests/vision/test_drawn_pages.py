"""Pages drawn for a person to look at."""

import asyncio
import io
from pathlib import Path

import pytest
from document_makers import draw_pdf, write_lines
from PIL import Image

from mmserve.errors import DocumentError, RequestError
from mmserve.vision.page_types import Document, RenderSettings
from mmserve.vision.page_workers import PageWorker
from mmserve.vision.pages import PageReader


@pytest.mark.parametrize("width", [40, 333, 1500])
def test_a_page_is_drawn_at_the_width_that_is_asked_for(reader: PageReader, tmp_path: Path, width: int) -> None:
    path = tmp_path / "a.pdf"
    path.write_bytes(draw_pdf(write_lines(["first"]), write_lines(["second"]), size=(595.27, 841.89)))

    async def draw() -> list[bytes]:
        document = await reader.open(path)
        return [await reader.draw(document, number, width) for number in (1, 2)]

    first, second = (Image.open(io.BytesIO(content)) for content in asyncio.run(draw()))
    assert (first.format, first.width) == ("PNG", width)
    assert first.height == pytest.approx(width * 841.89 / 595.27, abs=1)
    assert first.tobytes() != second.tobytes()


def test_a_picture_is_drawn_no_larger_than_it_is_and_read_in_full_afterwards(
    worker: PageWorker, tmp_path: Path
) -> None:
    path = tmp_path / "a.jpg"
    Image.new("RGB", (1600, 900), "white").save(path)
    document = Document(path, "a.jpg", "image/jpeg", "0" * 64, 1)
    sizes = [Image.open(io.BytesIO(worker.draw_page(document, 1, width))).size for width in (64, 800, 4000)]
    assert sizes == [(64, pytest.approx(36, abs=1)), (800, 450), (1600, 900)]
    assert worker.render_page(document, 1, RenderSettings()).shape == (900, 1600, 3)


def test_what_would_be_too_large_is_drawn_smaller(worker: PageWorker, tmp_path: Path) -> None:
    path = tmp_path / "long.pdf"
    path.write_bytes(draw_pdf(write_lines(["long"]), size=(100, 14_000)))
    drawn = Image.open(io.BytesIO(worker.draw_page(Document(path, "long.pdf", "application/pdf", "0", 1), 1, 4096)))
    assert drawn.size[0] * drawn.size[1] <= 16_100_000


def test_a_page_that_is_not_there_or_of_text_is_not_drawn(reader: PageReader, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("words")
    document = asyncio.run(reader.open(path))
    with pytest.raises(RequestError, match="no page 2"):
        asyncio.run(reader.draw(document, 2, 100))
    with pytest.raises(DocumentError, match="is text"):
        asyncio.run(reader.draw(document, 1, 100))
