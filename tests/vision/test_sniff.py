import io
from pathlib import Path

import pytest
from document_makers import PROSE, draw_pdf, write, write_lines
from PIL import Image

from mmserve.errors import DocumentError
from mmserve.vision.sniff import media_type_of


def encoded(format_name: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 48), "navy").save(buffer, format_name)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("format_name", "media_type"),
    [
        ("PNG", "image/png"),
        ("JPEG", "image/jpeg"),
        ("WEBP", "image/webp"),
        ("TIFF", "image/tiff"),
        ("GIF", "image/gif"),
        ("BMP", "image/bmp"),
        ("AVIF", "image/avif"),
    ],
)
def test_pictures_are_known_by_content_whatever_their_name(tmp_path: Path, format_name: str, media_type: str) -> None:
    path = write(tmp_path, "report.pdf", encoded(format_name))
    assert media_type_of(path, path.name) == media_type


def test_heic_is_known_by_content() -> None:
    path = Path(__file__).parent / "data" / "two_colors.heic"
    assert media_type_of(path, "photo.jpg") == "image/heic"


@pytest.mark.parametrize("junk", [b"", b"\n\n", b"HTTP/1.1 200 OK\r\nServer: x\r\n\r\n", b"x" * 2000])
def test_pdf_is_found_behind_junk(tmp_path: Path, junk: bytes) -> None:
    path = write(tmp_path, "scan.jpg", junk + draw_pdf(write_lines(PROSE)))
    assert media_type_of(path, path.name) == "application/pdf"


@pytest.mark.parametrize(
    "data",
    [
        b"# Notes\n\nPlain *markdown* <b>with</b> a tag.",
        "Grüße\n\n".encode() * 2000,
        "\ufeffText".encode("utf-16"),
    ],
)
def test_text_is_text(tmp_path: Path, data: bytes) -> None:
    path = write(tmp_path, "notes.md", data)
    assert media_type_of(path, path.name) == "text/plain"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"<!DOCTYPE html><html><body>%PDF-1.4</body></html>", "a web page"),
        (b"\n <!-- saved --> <html><body>Sign in</body>", "a web page"),
        (b"<?xml version='1.0'?><svg/>", "XML"),
        (b"PK\x03\x04" + bytes(60), "Office document"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(60), "old Office document"),
        (b"{\\rtf1 hello}", "RTF"),
        (b"\x7fELF" + bytes(60), "a program"),
        (bytes(range(256)), "not known"),
        (b"caf\xe9 au lait, in Latin-1", "not known"),
    ],
)
def test_other_files_are_refused_by_what_they_are(tmp_path: Path, data: bytes, words: str) -> None:
    path = write(tmp_path, "report.pdf", data)
    with pytest.raises(DocumentError) as caught:
        media_type_of(path, "report.pdf")
    assert caught.value.code == "unsupported_type"
    assert words in caught.value.message
    assert "report.pdf" in caught.value.message


def test_an_empty_file_is_called_empty(tmp_path: Path) -> None:
    with pytest.raises(DocumentError) as caught:
        media_type_of(write(tmp_path, "a.pdf", b""), "a.pdf")
    assert caught.value.code == "empty_document"


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_a_web_page_in_wide_characters_is_one(tmp_path: Path, encoding: str) -> None:
    path = write(tmp_path, "report.pdf", "\ufeff<!DOCTYPE html><html><body>Sign in</body></html>".encode(encoding))
    with pytest.raises(DocumentError) as caught:
        media_type_of(path, "report.pdf")
    assert caught.value.code == "unsupported_type"
    assert "a web page" in caught.value.message
