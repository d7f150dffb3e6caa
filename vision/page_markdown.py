"""A page's blocks -> Markdown (CommonMark, with GitHub's tables) that shows the page's characters and nothing else."""

import re
from collections.abc import Sequence

from mmserve.vision.page_blocks import Block, Heading, ListItem, Paragraph, blocks_of
from mmserve.vision.page_tables import Table
from mmserve.vision.reading_order import Line

# What would be read as emphasis, code, a tag, a link, an entity or a struck-out word.
_INLINE = re.compile(r"[\\`*<]|(?<!\w)_|_(?!\w)|\](?=\()|~(?=~)|&(?=#?\w{1,32};)")
_LINE_START = re.compile(r"^(?=#{1,6}(?:\s|$)|[>+-](?:\s|$)|[=-]+$)")
_NUMBERED = re.compile(r"^(\d{1,9})(?=[.)](?:\s|$))")


def markdown_of(lines: Sequence[Line]) -> str:
    """The page on which `lines` stand. Its text is data: what spells Markdown on the page is escaped."""
    blocks = blocks_of(lines)
    text = ""
    for before, block in zip([None, *blocks], blocks, strict=False):
        is_list = isinstance(before, ListItem) and isinstance(block, ListItem)
        text += ("" if before is None else "\n" if is_list else "\n\n") + _rendered(block)
    return text


def escaped_lines(text: str) -> str:
    """Plain text whose lines stay as they are, as one or more paragraphs."""
    paragraphs = [paragraph for paragraph in re.split(r"\n\s*\n", text.strip("\n")) if paragraph.strip()]
    return "\n\n".join(_lines(paragraph.splitlines()) for paragraph in paragraphs)


def _rendered(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"{'#' * level} {_inline(text)}"
        case Paragraph(lines, is_bold):
            return "  \n".join(f"**{_inline(line)}**" for line in lines) if is_bold else _lines(lines)
        case ListItem(text):
            mark, _, rest = text.partition(" ")
            return f"{mark} {_inline(rest)}"
        case Table():
            return _table(block)


def _lines(lines: Sequence[str]) -> str:
    """Lines that end where they end on the page."""
    return "  \n".join(_line(line.strip()) for line in lines)


def _line(text: str) -> str:
    return _NUMBERED.sub(r"\1\\", _LINE_START.sub(r"\\", _inline(text)))


def _inline(text: str) -> str:
    return _INLINE.sub(lambda match: "\\" + match[0], " ".join(text.split()))


def _table(table: Table) -> str:
    rows = [[_inline(cell).replace("|", "\\|") for cell in row] for row in table.rows]
    header = rows[0] if table.has_header else [""] * len(rows[0])
    marks = ["---:" if is_numeric else "---" for is_numeric in table.is_numeric]
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, marks, *(rows[1:] if table.has_header else rows)])
