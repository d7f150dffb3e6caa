"""Text as a reader would copy it: ligatures expanded, words joined over line ends, no control characters."""

import re
import unicodedata

# Latin and Armenian ligatures, Hebrew and Arabic presentation forms: glyph variants, never a writer's choice of letter
_PRESENTATION_FORMS = re.compile("[\ufb00-\ufb06\ufb13-\ufb17\ufb1d-\ufb4f\ufb50-\ufdff\ufe70-\ufefc]")
_LINE_END_HYPHEN = re.compile("(?:[\x02\ufffe]|\u00ad(?=\n))\n?")
_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u00ad\ufeff\ufffe\uffff]")
_TRAILING_SPACE = re.compile(r"[ \t\u00a0]+$", re.M)
_MANY_EMPTY_LINES = re.compile(r"\n{4,}")


def clean_page_text(text: str) -> str:
    """Text of a PDF's text layer: pdfium writes `\\x02` where a line ended in a hyphen."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = _LINE_END_HYPHEN.sub(_join_hyphenated, text)
    text = _PRESENTATION_FORMS.sub(lambda match: unicodedata.normalize("NFKC", match[0]), text)
    return clean_plain_text(text)


def clean_plain_text(text: str) -> str:
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = _CONTROLS.sub("", text).encode("utf-8", "ignore").decode()
    return _MANY_EMPTY_LINES.sub("\n\n\n", _TRAILING_SPACE.sub("", text)).strip("\n")


def _join_hyphenated(match: re.Match[str]) -> str:
    """A hyphen between two lower-case letters was put there by the line end; any other belongs to the word."""
    before, after = match.string[match.start() - 1 : match.start()], match.string[match.end() : match.end() + 1]
    if not before or not after or before.isspace() or after.isspace():
        return "-" + match[0].strip("\x02\ufffe\u00ad")
    return "" if before.islower() and after.islower() else "-"
