"""What a file is, by its content. Names lie: a JPEG called .pdf is read as a JPEG, HTML called .pdf is refused."""

import codecs
import re
from pathlib import Path

from mmserve.errors import DocumentError

HEAD_BYTES = 16 * 1024
PDF_TYPE = "application/pdf"
TEXT_TYPE = "text/plain"

_SIGNATURES: tuple[tuple[bytes, str], ...] = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"II*\x00", "image/tiff"),
    (b"MM\x00*", "image/tiff"),
    (b"II+\x00", "image/tiff"),
    (b"MM\x00+", "image/tiff"),
)
_ISO_BRANDS = {
    **dict.fromkeys((b"avif", b"avis"), "image/avif"),
    **dict.fromkeys((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"), "image/heic"),
}
_UNSUPPORTED: tuple[tuple[bytes, str], ...] = (
    (b"PK\x03\x04", "a ZIP archive or an Office document (docx, xlsx, pptx, odt)"),
    (b"\xd0\xcf\x11\xe0", "an old Office document (doc, xls, ppt)"),
    (b"{\\rtf", "an RTF document"),
    (b"%!PS", "PostScript"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"7z\xbc\xaf", "a 7z archive"),
    (b"Rar!", "a RAR archive"),
    (b"\x7fELF", "a program"),
    (b"MZ", "a program"),
    (b"ID3", "a sound file"),
    (b"OggS", "a sound file"),
    (b"8BPS", "a Photoshop file"),
    (b"\x00\x00\x00\x0cjP  ", "a JPEG 2000 picture"),
    (b"\xff\x0a", "a JPEG XL picture"),
    (b"\x00\x00\x00\x0cJXL ", "a JPEG XL picture"),
)
_MARKUP = re.compile(
    rb"\s*(?:<!--.*?-->\s*)*<(!doctype\s+html|html|head|body|script|\?xml|svg|!doctype)\b", re.I | re.S
)
_WIDE_ENCODINGS = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
_ALLOWED_CONTROLS = frozenset(b"\t\n\r\f\x1b\x08")
_SUPPORTED = "PDF, PNG, JPEG, WebP, TIFF, GIF, BMP, AVIF, HEIC or plain text"


def media_type_of(path: Path, name: str) -> str:
    """The media type of a file that can be read here.

    Raises `DocumentError`: `empty_document` for no bytes, `unsupported_type` naming what the file seems to be.
    """
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if not head:
        raise DocumentError("empty_document", f"{name} is empty (0 bytes)")
    head = _in_one_byte(head)
    found = _binary_type(head) or (TEXT_TYPE if _looks_like_text(head) else None)
    if found is None:
        raise DocumentError("unsupported_type", f"{name} is {_describe(head)}; give {_SUPPORTED}")
    return found


def pdf_offset(head: bytes) -> int:
    """Where the `%PDF-` header starts in the first bytes of a file (junk before it is common), negative for nowhere."""
    return head.find(b"%PDF-")


def _binary_type(head: bytes) -> str | None:
    for signature, media_type in _SIGNATURES:
        if head.startswith(signature):
            return media_type
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "image/webp"
    if head[4:8] == b"ftyp":
        return _iso_type(head)
    if (
        head[:2] == b"BM"
        and len(head) >= 18
        and int.from_bytes(head[14:18], "little") in (12, 16, 40, 52, 56, 64, 108, 124)
    ):
        return "image/bmp"
    if pdf_offset(head) >= 0 and not _MARKUP.match(head) and not any(head.startswith(s) for s, _ in _UNSUPPORTED):
        return PDF_TYPE
    return None


def _iso_type(head: bytes) -> str | None:
    """AVIF or HEIC by the major brand, else by the compatible brands, of an ISO base media file."""
    size = min(int.from_bytes(head[:4], "big"), len(head))
    brands = [head[8:12], *(head[i : i + 4] for i in range(16, size, 4))]
    known = [brand for brand in brands if brand in _ISO_BRANDS]
    # mif1 and msf1 only say that there are pictures, whatever their codec
    specific = [brand for brand in known if brand not in (b"mif1", b"msf1")]
    return next((_ISO_BRANDS[brand] for brand in (specific or known)), None)


def _in_one_byte(head: bytes) -> bytes:
    """The head of a text in UTF-16 as UTF-8, so that markup is seen in it; any other as it is."""
    encoding = _WIDE_ENCODINGS.get(head[:2])
    if encoding is None or head[2:4] == b"\0\0":
        return head
    return head[2 : len(head) // 2 * 2].decode(encoding, "ignore").encode()


def _looks_like_text(head: bytes) -> bool:
    if _MARKUP.match(head.removeprefix(b"\xef\xbb\xbf")) or any(head.startswith(s) for s, _ in _UNSUPPORTED):
        return False
    if any(byte < 32 and byte not in _ALLOWED_CONTROLS for byte in head):
        return False
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as error:
        # the head may end inside a character
        return len(head) == HEAD_BYTES and error.start >= len(head) - 3
    return True


def _describe(head: bytes) -> str:
    for signature, description in _UNSUPPORTED:
        if head.startswith(signature):
            return description
    markup = _MARKUP.match(head.removeprefix(b"\xef\xbb\xbf"))
    if markup is None:
        return "of a type that is not known here"
    return "XML" if markup[1].lower() in (b"?xml", b"svg") else "a web page (HTML)"
