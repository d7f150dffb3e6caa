from pathlib import Path

import numpy as np
import pytest
from document_makers import PROSE, draw_pdf, draw_picture, edit_pdf, picture_of, write, write_lines

from mmserve.errors import DocumentError
from mmserve.vision.ocr import OcrEngine
from mmserve.vision.page_types import Document, PageLimits, PageOptions, RenderSettings
from mmserve.vision.page_workers import PageWorker
from mmserve.vision.poppler import render_with_poppler


def test_both_renderers_agree(tmp_path: Path) -> None:
    turned = edit_pdf(draw_pdf(write_lines(PROSE)), lambda pdf: pdf.pages[0].rotate(90, relative=True))
    path = write(tmp_path, "a.pdf", turned)
    worker = PageWorker(PageLimits(), PageOptions(ocr="off"), 1)
    document = Document(path, "a.pdf", "application/pdf", "0" * 64, 1)
    ours = worker.render_page(document, 1, RenderSettings(renderer="pdfium"))
    theirs = worker.render_page(document, 1, RenderSettings(renderer="poppler"))
    worker.close()
    assert abs(ours.shape[0] - theirs.shape[0]) <= 1
    assert abs(ours.shape[1] - theirs.shape[1]) <= 1
    height, width = np.minimum(ours.shape, theirs.shape)[:2]
    difference = ours[:height, :width].astype(int) - theirs[:height, :width]
    assert np.abs(difference).mean() < 3


def test_a_scan_is_read_through_poppler(tmp_path: Path, ocr_engine: OcrEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmserve.vision.page_workers.load_engine", lambda name, num_threads, timeout: ocr_engine)
    scan = picture_of(["Order 5530 is accepted"], size=(1240, 1754), font_size=40)
    path = write(tmp_path, "a.pdf", draw_pdf(draw_picture(scan)))
    worker = PageWorker(PageLimits(), PageOptions(renderer="poppler"), 1)
    page = worker.read_page(Document(path, "a.pdf", "application/pdf", "0" * 64, 1), 1)
    worker.close()
    assert "5530" in page.text


def test_what_poppler_cannot_render_is_a_document_error(tmp_path: Path) -> None:
    with pytest.raises(DocumentError) as caught:
        render_with_poppler(write(tmp_path, "a.pdf", b"%PDF-1.4 nonsense"), 1, 72)
    assert caught.value.code == "corrupt_document"
