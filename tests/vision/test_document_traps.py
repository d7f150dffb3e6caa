"""PDFs that break readers, each of a kind that has been met."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pikepdf
import pytest
from document_makers import (
    PROSE,
    draw_pdf,
    draw_picture,
    edit_pdf,
    picture_of,
    with_character_map,
    write,
    write_lines,
)

from mmserve.errors import DocumentError
from mmserve.vision.page_types import Page, PageLimits
from mmserve.vision.pdf import PdfFile

Read = Callable[..., list[Page]]
HEBREW = "<20> <60> <0020>\n<61> <7A> <05D0>"
# Drawn from the left, as a reader sees them; the letters stand for Hebrew ones.
HEBREW_LINES = ("gfed 2024 cba", "lkj ihg fed", "onm 1234567890 lkj")
HEBREW_TEXT = ("אבג 2024 דהוז", "דהו זחט יךכ", "יךכ 1234567890 לםמ")


def turned(data: bytes, angle: float) -> bytes:
    def turn(pdf: pikepdf.Pdf) -> None:
        pdf.pages[0].Rotate = angle

    return edit_pdf(data, turn)


@pytest.mark.parametrize("angle", [-90, 450, -270, 720, 45])
def test_any_angle_is_brought_to_quarter_turns(read_without_ocr: Read, tmp_path: Path, angle: int) -> None:
    (page,) = read_without_ocr(write(tmp_path, "a.pdf", turned(draw_pdf(write_lines(PROSE)), angle)))
    assert page.text.splitlines() == list(PROSE)
    assert (page.width > page.height) == (angle % 180 == 90)


def test_an_inherited_angle_counts(read_without_ocr: Read, tmp_path: Path) -> None:
    def turn(pdf: pikepdf.Pdf) -> None:
        del pdf.pages[0]["/Rotate"]
        pdf.Root.Pages.Rotate = 90

    (page,) = read_without_ocr(write(tmp_path, "a.pdf", edit_pdf(draw_pdf(write_lines(PROSE)), turn)))
    assert page.text.splitlines() == list(PROSE)
    assert page.width > page.height


@pytest.mark.parametrize("angle", [0, 90, 180, 270])
def test_lines_that_run_to_the_left_keep_their_order_on_turned_pages(
    read_without_ocr: Read, tmp_path: Path, angle: int
) -> None:
    data = with_character_map(draw_pdf(write_lines(HEBREW_LINES)), HEBREW)
    (page,) = read_without_ocr(write(tmp_path, "a.pdf", turned(data, angle)))
    assert page.text.splitlines() == list(HEBREW_TEXT)


def test_lines_that_run_to_the_left_and_are_drawn_in_disorder(read_without_ocr: Read, tmp_path: Path) -> None:
    def draw(target: Any) -> None:
        for index in (2, 0, 1):
            target.drawString(72, 760 - 20 * index, HEBREW_LINES[index])

    (page,) = read_without_ocr(write(tmp_path, "a.pdf", with_character_map(draw_pdf(draw), HEBREW)))
    assert page.text.splitlines() == list(HEBREW_TEXT)


@pytest.mark.parametrize("meaning", ["0000", "FFFD"])
def test_letters_that_the_layer_lacks_are_read_from_the_page(
    read: Read, read_without_ocr: Read, tmp_path: Path, meaning: str
) -> None:
    line = "Seven members gave their views on it."
    mapping = f"<20> <75> <0020>\n<76> <76> <{meaning}>\n<77> <7E> <0077>"
    path = write(tmp_path, "a.pdf", with_character_map(draw_pdf(write_lines([*PROSE[1:], line])), mapping))
    (page,) = read(path)
    assert page.source == "text_layer"
    assert page.text.splitlines()[-1] == line
    assert page.notes == ("Lines that lack letters in the text layer were read by OCR.",)
    (page,) = read_without_ocr(path)
    assert page.notes == ("The text layer lacks some letters, and OCR is off or not installed.",)


def test_little_text_that_reads_like_no_words_is_held_against_the_page(read: Read, tmp_path: Path) -> None:
    lines = ("Payment is due today", "The bridge remains closed")
    shifted = "<41> <59> <0042>\n<61> <79> <0062>"
    (page,) = read(write(tmp_path, "a.pdf", with_character_map(draw_pdf(write_lines(lines)), shifted)))
    assert (page.source, page.text.splitlines()) == ("ocr", list(lines))
    assert any("garbled" in note for note in page.notes)
    codes = ("QX9912 ZK37 JQVX WKZJ 118", "BQZL ZZKX QVJW XXKQ 204")
    (page,) = read(write(tmp_path, "b.pdf", draw_pdf(write_lines(codes))))
    assert (page.source, page.text.splitlines(), page.notes) == ("text_layer", list(codes), ())


def test_free_text_on_a_page_without_a_form_does_not_end_it(read_without_ocr: Read, tmp_path: Path) -> None:
    def draw(target: Any) -> None:
        write_lines(PROSE)(target)
        target.freeTextAnnotation("Approved", (100, 400, 300, 440))

    (page,) = read_without_ocr(write(tmp_path, "a.pdf", draw_pdf(draw)))
    assert page.text.splitlines()[: len(PROSE)] == list(PROSE)


def test_a_file_that_is_pinned_to_a_page_is_told(read_without_ocr: Read, tmp_path: Path) -> None:
    def pin(pdf: pikepdf.Pdf) -> None:
        file = pikepdf.AttachedFileSpec(pdf, b"x", filename="../../evil\n.sh")
        annotation = pikepdf.Dictionary(
            Type=pikepdf.Name.Annot, Subtype=pikepdf.Name.FileAttachment, Rect=[10, 10, 20, 20], FS=file.obj
        )
        pdf.pages[0].Annots = pikepdf.Array([pdf.make_indirect(annotation)])

    folder = tmp_path / "deep" / "er"
    folder.mkdir(parents=True)
    (page,) = read_without_ocr(write(folder, "a.pdf", edit_pdf(draw_pdf(write_lines(PROSE)), pin)))
    assert page.notes == ("Attached to the page and not read: ../../evil.sh.",)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["a.pdf"]


def test_names_of_attachments_are_printable_and_short(tmp_path: Path) -> None:
    def attach(pdf: pikepdf.Pdf) -> None:
        file = pikepdf.AttachedFileSpec(pdf, b"x", filename="a.txt")
        file.obj.UF = pikepdf.String("\u202egpj\x1b[31m" + "x" * 5000)
        pdf.attachments["a.txt"] = file

    pdf = PdfFile(write(tmp_path, "a.pdf", edit_pdf(draw_pdf(write_lines(PROSE)), attach)), "a.pdf", PageLimits())
    (name,) = pdf.attachments()
    assert name.isprintable()
    assert len(name) <= 255
    pdf.close()


def test_an_attachment_that_is_no_file_costs_nothing(tmp_path: Path) -> None:
    def attach(pdf: pikepdf.Pdf) -> None:
        pdf.attachments["a.txt"] = b"x"

    data = edit_pdf(draw_pdf(write_lines(PROSE)), attach, object_stream_mode=pikepdf.ObjectStreamMode.disable)
    start = data.rindex(b" 0 obj", 0, data.index(b"/Type /Filespec"))
    path = write(tmp_path, "a.pdf", data[:start] + b" 0 xxx" + data[start + 6 :])
    pdf = PdfFile(path, "a.pdf", PageLimits())
    assert pdf.attachments() == ()
    with pdf.page(1) as page:
        assert PROSE[0] in page.text()
    pdf.close()


def test_a_picture_that_ends_early_is_told(read_without_ocr: Read, tmp_path: Path) -> None:
    def cut(pdf: pikepdf.Pdf) -> None:
        (image,) = pdf.pages[0].Resources.XObject.values()
        jpeg = io.BytesIO()
        picture_of(PROSE, size=(1000, 400)).save(jpeg, "JPEG")
        data = jpeg.getvalue()
        image.write(data[: len(data) // 2], filter=pikepdf.Name.DCTDecode)

    whole = draw_pdf(draw_picture(picture_of(PROSE, size=(1000, 400)), (0, 300, 595, 238)))
    assert "cut off" not in " ".join(read_without_ocr(write(tmp_path, "a.pdf", whole))[0].notes)
    (page,) = read_without_ocr(write(tmp_path, "b.pdf", edit_pdf(whole, cut)))
    assert "A picture on the page is cut off: its data ends early." in page.notes


@pytest.mark.parametrize("user", ["u", ""])
def test_a_lock_that_is_no_password_is_called_a_lock(tmp_path: Path, user: str) -> None:
    encryption = pikepdf.Encryption(user=user, owner="o", R=6)
    data = edit_pdf(draw_pdf(write_lines(PROSE)), lambda _: None, encryption=encryption)
    path = write(tmp_path, "a.pdf", data.replace(b"/Filter /Standard", b"/Filter /Adobe.Pu"))
    with pytest.raises(DocumentError) as caught:
        PdfFile(path, "a.pdf", PageLimits())
    assert caught.value.code == "password_required"
    assert "a.pdf is locked" in caught.value.message


@pytest.mark.parametrize(
    "box", [[0, 0, 1e9, 1e9], [0, 0, 0, 0], [600, 800, 0, 0], [0, 0, 1e38, 1e38], [-1e7, -1e7, 1e7, 1e7]]
)
def test_page_boxes_beyond_reason_do_not_matter(read_without_ocr: Read, tmp_path: Path, box: list[float]) -> None:
    def change(pdf: pikepdf.Pdf) -> None:
        pdf.pages[0].MediaBox = box

    (page,) = read_without_ocr(write(tmp_path, "a.pdf", edit_pdf(draw_pdf(write_lines(PROSE)), change)))
    assert page.text.splitlines() == list(PROSE)


def test_a_page_without_area_is_a_problem_of_its_own(read_without_ocr: Read, tmp_path: Path) -> None:
    def flatten(pdf: pikepdf.Pdf) -> None:
        pdf.pages[0].MediaBox = [0, 0, 595, 842]
        pdf.pages[0].CropBox = [700, 900, 800, 950]

    data = edit_pdf(draw_pdf(write_lines(PROSE), write_lines(PROSE)), flatten)
    first, second = read_without_ocr(write(tmp_path, "a.pdf", data))
    assert first.problem is None or first.problem.code == "corrupt_document"
    assert PROSE[0] not in first.text
    assert second.text.splitlines() == list(PROSE)
