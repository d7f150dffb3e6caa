from pathlib import Path

import pikepdf
import pytest
from document_makers import PROSE, draw_nothing, draw_pdf, edit_pdf, write, write_lines

from mmserve.errors import DocumentError
from mmserve.vision.page_types import PageLimits
from mmserve.vision.pdf import PdfFile


def error_of(path: Path, limits: PageLimits | None = None) -> DocumentError:
    with pytest.raises(DocumentError) as caught:
        PdfFile(path, path.name, limits or PageLimits())
    return caught.value


def report(num_pages: int = 1) -> bytes:
    return draw_pdf(*[write_lines(PROSE)] * num_pages)


@pytest.mark.parametrize("revision", [4, 6])
def test_a_user_password_is_asked_for(tmp_path: Path, revision: int) -> None:
    encryption = pikepdf.Encryption(user="u", owner="o", R=revision)
    error = error_of(write(tmp_path, "a.pdf", edit_pdf(report(), lambda _: None, encryption=encryption)))
    assert error.code == "password_required"
    assert "a.pdf" in error.message


def test_an_owner_password_alone_opens(tmp_path: Path) -> None:
    encryption = pikepdf.Encryption(user="", owner="o", R=6)
    path = write(tmp_path, "a.pdf", edit_pdf(report(), lambda _: None, encryption=encryption))
    pdf = PdfFile(path, "a.pdf", PageLimits())
    with pdf.page(1) as page:
        assert PROSE[0] in page.text()
    pdf.close()


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("linearize", [False, True])
def test_a_truncated_file_is_refused(tmp_path: Path, share: float, linearize: bool) -> None:
    data = edit_pdf(report(20), lambda _: None, linearize=linearize)
    assert error_of(write(tmp_path, "a.pdf", data[: int(len(data) * share)])).code == "corrupt_document"


def test_a_truncated_update_is_refused(tmp_path: Path) -> None:
    whole = report()
    update = b"\n7 0 obj\n<< /Type /Page >>\nendobj\nxref\n"
    assert error_of(write(tmp_path, "a.pdf", whole + update)).code == "corrupt_document"


@pytest.mark.parametrize("tail", [b"", b"\n\n", bytes(3000), b"\r\n<!-- served by x -->"])
def test_a_whole_file_with_something_behind_it_opens(tmp_path: Path, tail: bytes) -> None:
    pdf = PdfFile(write(tmp_path, "a.pdf", report() + tail), "a.pdf", PageLimits())
    assert pdf.num_pages == 1
    pdf.close()


@pytest.mark.parametrize("length", [21, 1000, 2000, 9000])
def test_junk_before_the_header_is_skipped(tmp_path: Path, length: int) -> None:
    pdf = PdfFile(write(tmp_path, "a.pdf", b"x" * length + b"\n" + report()), "a.pdf", PageLimits())
    with pdf.page(1) as page:
        assert PROSE[0] in page.text()
    pdf.close()


def test_a_file_that_only_starts_like_a_pdf_is_refused(tmp_path: Path) -> None:
    assert error_of(write(tmp_path, "a.pdf", b"%PDF-1.7\n" + b"nothing " * 50 + b"%%EOF")).code == "corrupt_document"


def test_too_many_pages_are_refused(tmp_path: Path) -> None:
    error = error_of(write(tmp_path, "a.pdf", draw_pdf(*[draw_nothing] * 5)), PageLimits(max_pages=4))
    assert error.code == "too_many_pages"
    assert "5 pages" in error.message


def test_attachments_are_listed_and_never_written(tmp_path: Path) -> None:
    def attach(pdf: pikepdf.Pdf) -> None:
        pdf.attachments["../../evil.sh"] = b"x"

    folder = tmp_path / "deep" / "er"
    folder.mkdir(parents=True)
    pdf = PdfFile(write(folder, "a.pdf", edit_pdf(report(), attach)), "a.pdf", PageLimits())
    assert pdf.attachments() == ("../../evil.sh",)
    pdf.close()
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["a.pdf"]


def test_a_page_is_rendered_within_the_pixel_budget(tmp_path: Path) -> None:
    def enlarge(pdf: pikepdf.Pdf) -> None:
        pdf.pages[0].MediaBox = [0, 0, 14400, 14400]

    pdf = PdfFile(write(tmp_path, "a.pdf", edit_pdf(report(), enlarge)), "a.pdf", PageLimits())
    with pdf.page(1) as page:
        pixels = page.render(page.scale_for(150, 1_000_000))
    assert pixels.shape == (1000, 1000, 3)
    pdf.close()


def test_form_fields_are_drawn(tmp_path: Path) -> None:
    def draw(target: object) -> None:
        target.acroForm.textfield(name="n", x=100, y=700, width=200, height=30, value="Ada", borderWidth=0)  # type: ignore[attr-defined]

    pdf = PdfFile(write(tmp_path, "a.pdf", draw_pdf(draw)), "a.pdf", PageLimits())
    with pdf.page(1) as page:
        field = page.render(1.0)[112:142, 100:300]
    assert field.min() < 100
    pdf.close()
