import asyncio
import io
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pikepdf
import psutil
import pytest
from document_makers import PROSE, draw_nothing, draw_pdf, edit_pdf, picture_of, save, write, write_lines
from PIL import Image

from mmserve.errors import DocumentError, RequestError, SetupError
from mmserve.vision.image import RGB
from mmserve.vision.page_types import RenderSettings
from mmserve.vision.pages import Document, Page, PageLimits, PageOptions, PageReader, parse_page_selection

Collect = Callable[[Path], list[Page]]


def open_document(reader: PageReader, path: Path) -> Document:
    return asyncio.run(reader.open(path))


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("3", [3]),
        ("1-4,7,9-", [1, 2, 3, 4, 7, 9, 10]),
        ("-2", [1, 2]),
        (" 2 , 1 ", [2, 1]),
        ("2-3,3-4", [2, 3, 4]),
        ("8-20", [8, 9, 10]),
        ("10-", [10]),
        ("11", None),
        ("11-", None),
        ("0", None),
        ("4-2", None),
        ("", None),
        ("a", None),
        ("1,,2", None),
    ],
)
def test_page_selection(text: str, numbers: list[int] | None) -> None:
    if numbers is not None:
        assert parse_page_selection(text, 10) == numbers
        return
    with pytest.raises(RequestError) as caught:
        parse_page_selection(text, 10)
    assert caught.value.code == "invalid_request"


def test_a_pdf_comes_page_by_page(reader: PageReader, collect: Collect, tmp_path: Path) -> None:
    path = write(tmp_path, "a.pdf", draw_pdf(*[write_lines([f"This is page {n}."]) for n in range(1, 41)]))
    document = open_document(reader, path)
    assert (document.media_type, document.num_pages, document.name) == ("application/pdf", 40, "a.pdf")
    assert [page.text for page in collect(path)] == [f"This is page {n}." for n in range(1, 41)]


def test_a_selection_comes_in_its_order(reader: PageReader, tmp_path: Path) -> None:
    path = write(tmp_path, "a.pdf", draw_pdf(*[write_lines([f"This is page {n}."]) for n in range(1, 6)]))

    async def selected() -> list[int]:
        document = await reader.open(path)
        return [page.number async for page in reader.pages(document, [5, 1, 3])]

    assert asyncio.run(selected()) == [5, 1, 3]


def test_a_page_that_is_not_there_is_an_error(reader: PageReader, tmp_path: Path) -> None:
    path = write(tmp_path, "a.pdf", draw_pdf(draw_nothing))

    async def selected() -> list[Page]:
        document = await reader.open(path)
        return [page async for page in reader.pages(document, [2])]

    with pytest.raises(RequestError, match="no page 2"):
        asyncio.run(selected())


def test_text_files_have_pages_and_need_no_process(tmp_path: Path) -> None:
    path = write(tmp_path, "notes.md", b"# One\r\n\fTwo \x1band\n\n\f\f")

    async def all_pages() -> tuple[Document, list[Page]]:
        async with PageReader() as reader:
            document = await reader.open(path)
            return document, [page async for page in reader.pages(document)]

    before = len(psutil.Process().children(recursive=True))
    document, pages = asyncio.run(all_pages())
    assert len(psutil.Process().children(recursive=True)) == before
    assert (document.media_type, document.num_pages) == ("text/plain", 3)
    assert [(page.text, page.is_blank) for page in pages] == [("# One", False), ("Two and", False), ("", True)]


@pytest.mark.parametrize(
    ("name", "data", "code"),
    [
        ("a.pdf", b"", "empty_document"),
        ("a.pdf", b"<html><body>Please sign in</body></html>", "unsupported_type"),
        ("a.txt", b" \n \n", "empty_document"),
        ("a.txt", b"a" * 20_000 + b"\xe9", "unsupported_type"),
        ("a.png", b"\x89PNG\r\n\x1a\n" + b"x" * 100, "corrupt_document"),
        ("a.pdf", b"%PDF-1.4\n%%EOF", "corrupt_document"),
        ("a.pdf", draw_pdf(write_lines(PROSE))[:700], "corrupt_document"),
    ],
)
def test_bad_files_are_refused_with_a_sentence(
    reader: PageReader, tmp_path: Path, name: str, data: bytes, code: str
) -> None:
    with pytest.raises(DocumentError) as caught:
        open_document(reader, write(tmp_path, name, data))
    assert caught.value.code == code
    assert name in caught.value.message


def test_a_missing_file_is_an_error_and_not_a_crash(reader: PageReader, tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r"gone.pdf cannot be read"):
        open_document(reader, tmp_path / "gone.pdf")


def test_bytes_are_capped_before_anything_is_read(tmp_path: Path) -> None:
    reader = PageReader(limits=PageLimits(max_bytes=1000))
    with pytest.raises(DocumentError) as caught:
        open_document(reader, write(tmp_path, "a.pdf", bytes(1001)))
    assert caught.value.code == "body_too_large"
    reader.close()


def test_content_decides_and_not_the_name(reader: PageReader, collect: Collect, tmp_path: Path) -> None:
    path = save(tmp_path, "a.pdf", picture_of(["Delivery note 5521"], size=(600, 120)), format="JPEG")
    assert open_document(reader, path).media_type == "image/jpeg"
    (page,) = collect(path)
    assert page.source == "ocr"
    assert "5521" in page.text


def test_the_same_bytes_have_the_same_digest(reader: PageReader, tmp_path: Path) -> None:
    data = draw_pdf(draw_nothing)
    first, second = (open_document(reader, write(tmp_path, name, data)) for name in ("a.pdf", "b.pdf"))
    assert first.sha256 == second.sha256
    assert len(first.sha256) == 64


def test_page_images_fit_their_budget(reader: PageReader, tmp_path: Path) -> None:
    document = open_document(reader, write(tmp_path, "a.pdf", draw_pdf(write_lines(PROSE), draw_nothing)))
    small, large = RenderSettings(dpi=72), RenderSettings(dpi=300, max_pixels=1_000_000)

    async def images() -> list[RGB]:
        wanted = ((1, small), (1, large), (2, small))
        return [await reader._pool.call("render_page", document, *one, timeout=30) for one in wanted]

    first, finer, other = asyncio.run(images())
    assert first.shape == (842, 595, 3)
    assert 900_000 < finer.shape[0] * finer.shape[1] <= 1_002_000
    assert first.min() < 100
    assert other.min() == 255


def test_many_uploads_at_once_each_get_their_own_text(reader: PageReader, tmp_path: Path) -> None:
    paths = [write(tmp_path, f"{n}.pdf", draw_pdf(write_lines([f"Upload number {n}."] * 5))) for n in range(30)]

    async def text_of(path: Path) -> str:
        document = await reader.open(path)
        return "".join([page.text async for page in reader.pages(document)])

    async def all_texts() -> list[str]:
        return await asyncio.gather(*map(text_of, paths))

    assert asyncio.run(all_texts()) == ["\n".join([f"Upload number {n}."] * 5) for n in range(30)]


def test_pages_are_read_ahead_but_not_all(reader: PageReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "a.pdf", draw_pdf(*[write_lines(PROSE)] * 200))
    calls: list[str] = []
    pool_call = reader._pool.call

    async def counted(method: str, *args: object, **options: Any) -> Any:
        calls.append(method)
        return await pool_call(method, *args, **options)

    monkeypatch.setattr(reader._pool, "call", counted)

    async def three_pages() -> None:
        document = await reader.open(path)
        pages = reader.pages(document)
        for _ in range(3):
            await anext(pages)
        await pages.aclose()

    asyncio.run(three_pages())
    assert calls.count("read_without_ocr") == 1


def test_workers_load_no_torch(reader: PageReader, tmp_path: Path) -> None:
    open_document(reader, write(tmp_path, "a.pdf", draw_pdf(draw_nothing)))
    workers = [child for child in psutil.Process().children() if "spawn_main" in " ".join(child.cmdline())]
    assert workers
    for worker in workers:
        assert not [entry.path for entry in worker.memory_maps() if "torch" in entry.path]


def kill_workers_once(delay: float) -> None:
    time.sleep(delay)
    for child in psutil.Process().children():
        if "spawn_main" in " ".join(child.cmdline()):
            os.kill(child.pid, signal.SIGKILL)


def test_a_killed_worker_costs_nothing_but_time(reader: PageReader, tmp_path: Path) -> None:
    path = save(tmp_path, "a.png", picture_of(["Order 7714 of May", *PROSE], size=(1100, 900)))

    async def read_and_kill() -> Page:
        document = await reader.open(path)
        killing = asyncio.create_task(asyncio.to_thread(kill_workers_once, 0.3))
        (page,) = [page async for page in reader.pages(document)]
        await killing
        return page

    page = asyncio.run(read_and_kill())
    assert page.problem is None
    assert "7714" in page.text


def test_a_page_that_takes_too_long_is_reported_and_the_rest_come(tmp_path: Path) -> None:
    path = save(
        tmp_path, "a.tiff", Image.new("L", (64, 64), 255), save_all=True,
        append_images=[picture_of([*PROSE] * 8, size=(1400, 2000)), Image.new("L", (64, 64), 255)],
    )  # fmt: skip

    async def all_pages() -> list[Page]:
        async with PageReader(limits=PageLimits(page_timeout=0.25), num_workers=1) as reader:
            document = Document(path, "a.tiff", "image/tiff", "0" * 64, 3)
            await reader._pool.call("render_page", document, 1, RenderSettings(), timeout=30)
            return [page async for page in reader.pages(document)]

    first, second, third = asyncio.run(all_pages())
    assert second.problem is not None
    assert second.problem.code == "page_timeout"
    assert "page 2 of a.tiff" in second.problem.message
    assert second.text == ""
    assert {page.problem.code if page.problem else None for page in (first, third)} <= {None, "page_timeout"}


def test_memory_of_a_worker_is_bounded(tmp_path: Path) -> None:
    path = save(tmp_path, "a.png", Image.new("RGB", (8000, 8000), "white"))

    async def all_pages() -> list[Page]:
        async with PageReader(limits=PageLimits(worker_memory_bytes=100 * 1024**2), num_workers=1) as reader:
            document = await reader.open(path)
            return [page async for page in reader.pages(document)]

    (page,) = asyncio.run(all_pages())
    assert page.problem is not None
    assert page.problem.code in ("page_too_large", "corrupt_document")


def test_a_content_stream_that_swells_costs_its_page_only(tmp_path: Path) -> None:
    def swell(pdf: pikepdf.Pdf) -> None:
        pdf.pages[0].Contents = pikepdf.Stream(pdf, b"0 0 m 9 9 l S " * 2_000_000)

    data = edit_pdf(draw_pdf(write_lines(PROSE), write_lines(PROSE)), swell, recompress_flate=True)
    path = write(tmp_path, "a.pdf", data)
    assert len(data) < 100_000

    async def all_pages() -> list[Page]:
        async with PageReader(limits=PageLimits(worker_memory_bytes=200 * 1024**2), num_workers=1) as reader:
            document = await reader.open(path)
            return [page async for page in reader.pages(document)]

    bomb, sound = asyncio.run(all_pages())
    assert bomb.problem is not None
    assert bomb.text == ""
    assert sound.text.splitlines() == list(PROSE)


def test_mutated_files_never_raise_anything_but_document_errors(reader: PageReader, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    Image.effect_noise((60, 60), 90).save(buffer, "TIFF", compression="tiff_lzw")
    originals = (draw_pdf(write_lines(PROSE), draw_nothing), buffer.getvalue())
    chance = random.Random(7)
    outcomes: list[str] = []

    async def read(path: Path) -> None:
        try:
            document = await reader.open(path)
            selection = range(1, min(document.num_pages, 3) + 1)
            pages = [page async for page in reader.pages(document, selection)]
        except DocumentError as error:
            outcomes.append(error.code)
        else:
            outcomes.extend(page.problem.code if page.problem else "read" for page in pages)

    for number in range(40):
        data = bytearray(originals[number % 2])
        for _ in range(chance.randint(1, 30)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        asyncio.run(read(write(tmp_path, f"{number}.pdf", bytes(data))))
    assert len(outcomes) >= 40
    assert {"read", "corrupt_document"} <= set(outcomes)


@pytest.mark.parametrize(("program", "options"), [
    ("tesseract", PageOptions(ocr="tesseract")), ("pdftoppm", PageOptions(renderer="poppler")),
])  # fmt: skip
def test_a_missing_program_that_was_asked_for_is_named(
    monkeypatch: pytest.MonkeyPatch, program: str, options: PageOptions
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SetupError) as caught:
        PageReader(options=options)
    assert caught.value.code == "missing_dependency"
    assert "install" in caught.value.message


def test_a_closed_reader_says_so(tmp_path: Path) -> None:
    reader = PageReader()
    reader.close()
    with pytest.raises(Exception, match="closed"):
        open_document(reader, write(tmp_path, "a.pdf", draw_pdf(draw_nothing)))
