"""Lines with places -> headings, paragraphs, list items and tables, in the order in which a person reads them."""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mmserve.vision.page_regions import Region, regions_of
from mmserve.vision.page_tables import Row, Table, table_at
from mmserve.vision.reading_order import Line

# Heights of lines, as multiples of the body's, from which on they are headings of the first level, the second, ...
_HEADING_RATIOS = (1.7, 1.35, 1.18)
_MAX_HEADING_CHARACTERS, _MIN_HEADING_LETTERS = 120, 3
# As multiples of a line's height: gaps may differ by the first within a paragraph, heights by the second.
_LOOSE_GAP, _LOOSE_HEIGHT = 0.35, 0.15
_INDENT, _MIN_FLOWING_WIDTH = 4.0, 13.0
_WIDE_GAP = 2.0
_MAX_TABLE_ROWS = 1000
_SAME_EDGE = 0.6
_FOLLOWING_WIDTH = 1.3
_LIST_MARK = re.compile(r"[-*•·▪◦‣–—]|\(?(?:\d{1,3}|[a-z]|[ivx]{2,5})[.)]", re.IGNORECASE)
_BULLET = re.compile(r"^[*•·▪◦‣–—]\s+")
_BROKEN_WORD = re.compile(r"(?<=\w)[-\u00ad\u2010]$")


@dataclass(frozen=True)
class Heading:
    """`level` counts from 1."""

    level: int
    text: str


@dataclass(frozen=True)
class Paragraph:
    """Running text is one line; lines that stand for themselves, as in an address, are several."""

    lines: tuple[str, ...]
    is_bold: bool = False


@dataclass(frozen=True)
class ListItem:
    """Its text begins with its mark: `-`, or a number or letter."""

    text: str


Block = Heading | Paragraph | ListItem | Table


def blocks_of(lines: Sequence[Line]) -> list[Block]:
    """What a page is made of."""
    lines = [line for line in lines if line.text.strip()]
    if not lines:
        return []
    body = _body_height(lines)
    return [block for region in regions_of(lines) for block in _region_blocks(region, body)]


def _body_height(lines: Sequence[Line]) -> float:
    """The median height of characters."""
    ordered = sorted(lines, key=lambda line: line.height)
    counts = itertools.accumulate(len(line.text) for line in ordered)
    half = sum(len(line.text) for line in lines) / 2
    return next(line.height for line, count in zip(ordered, counts, strict=True) if count >= half)


def _region_blocks(region: Region, body: float) -> Iterator[Block]:
    rows = [_with_mark_joined(row) for row in region.rows]
    waiting: list[Line] = []
    index = 0
    while index < len(rows):
        row = rows[index]
        found = table_at(rows[index : index + _MAX_TABLE_ROWS]) if len(row) > 1 else None
        index += found[1] if found else 1
        if found is None and not _is_apart(row):
            waiting.append(_joined(row))
            continue
        yield from _text_blocks(waiting, region, body)
        waiting = []
        yield from [found[0]] if found else _text_blocks([_joined(row)], region, body)
    yield from _text_blocks(waiting, region, body)


def _is_apart(row: Row) -> bool:
    """Whether what stands side by side is no running text."""
    return any(after.left - before.right > _WIDE_GAP * before.height for before, after in itertools.pairwise(row))


def _with_mark_joined(row: Row) -> Row:
    """A list's mark that stands apart from its text is no cell."""
    is_item = len(row) == 2 and _LIST_MARK.fullmatch(row[0].text.strip())
    return [_joined(row)] if is_item else row


def _joined(row: Row) -> Line:
    """What stands side by side, as one line."""
    text = row[0].text
    for before, after in itertools.pairwise(row):
        text += ("  " if after.left - before.right > _WIDE_GAP * before.height else " ") + after.text
    return Line(
        text,
        min(line.left for line in row),
        min(line.top for line in row),
        max(line.right for line in row),
        max(line.bottom for line in row),
        all(line.is_bold for line in row),
    )


def _text_blocks(lines: Sequence[Line], region: Region, body: float) -> Iterator[Block]:
    """Headings, paragraphs and list items of lines below one another."""
    usual_gap = _usual_gap(lines)
    block: list[list[Line]] = []
    level: int | None = None
    for index, line in enumerate(lines):
        own_level = _heading_level(lines, index, body)
        if block and own_level == level and _is_next(block[-1][-1], line, usual_gap):
            if level is not None or _goes_on(block[-1], line, region.right_edges.of(line)):
                block[-1].append(line)
            else:
                block.append([line])
            continue
        yield from _block(block, level)
        block, level = [[line]], own_level
    yield from _block(block, level)


def _usual_gap(lines: Sequence[Line]) -> float:
    """The white between lines of one paragraph."""
    return min((max(b.top - a.bottom, 0.0) for a, b in itertools.pairwise(lines) if _are_alike(a, b)), default=0.0)


def _are_alike(line: Line, other: Line) -> bool:
    return abs(line.height - other.height) <= _LOOSE_HEIGHT * max(line.height, other.height)


def _heading_level(lines: Sequence[Line], index: int, body: float) -> int | None:
    line = lines[index]
    if len(line.text) > _MAX_HEADING_CHARACTERS or sum(c.isalnum() for c in line.text) < _MIN_HEADING_LETTERS:
        return None
    for level, ratio in enumerate(_HEADING_RATIOS, start=1):
        if line.height >= ratio * body:
            return level
    following = lines[index + 1] if index + 1 < len(lines) else None
    is_over_text = following is not None and not following.is_bold and following.width > _FOLLOWING_WIDTH * line.width
    return len(_HEADING_RATIOS) if line.is_bold and is_over_text and not line.text.endswith((".", ",")) else None


def _is_next(above: Line, line: Line, usual_gap: float) -> bool:
    """Whether two lines belong to one block: as close as lines are, of one size, and the second opens no item."""
    height = max(above.height, line.height)
    is_close = line.top - above.bottom <= usual_gap + _LOOSE_GAP * height
    return is_close and _are_alike(above, line) and not _starts_item(line)


def _starts_item(line: Line) -> bool:
    first, _, rest = line.text.strip().partition(" ")
    return bool(rest) and _LIST_MARK.fullmatch(first) is not None


def _goes_on(parts: Sequence[Line], line: Line, right: float) -> bool:
    """Whether a line was broken only because the next word did not fit."""
    last = parts[-1]
    has_own_edge = abs(last.left - line.left) > _SAME_EDGE * line.height
    if has_own_edge and abs(last.center[0] - line.center[0]) < _SAME_EDGE * line.height:
        return False
    indent = (parts[0].left - line.left) / line.height
    is_first = len(parts) == 1 and (0 <= indent < _INDENT or (_starts_item(parts[0]) and -_INDENT < indent <= 0))
    if has_own_edge and not is_first:
        return False
    if last.width < _MIN_FLOWING_WIDTH * last.height:
        return False
    word_width = line.width * (len(line.text.split()[0]) + 1) / max(len(line.text), 1)
    return last.right + word_width > right - 0.5 * line.height


def _block(block: Sequence[Sequence[Line]], level: int | None) -> Iterator[Block]:
    if not block:
        return
    texts = tuple(_flowing([line.text.strip() for line in parts]) for parts in block)
    if level is not None:
        yield Heading(level, " ".join(texts))
    elif _starts_item(block[0][0]):
        yield ListItem(_BULLET.sub("- ", " ".join(texts)))
    else:
        yield Paragraph(texts, all(line.is_bold for parts in block for line in parts))


def _flowing(texts: Sequence[str]) -> str:
    text = texts[0]
    for following in texts[1:]:
        is_broken = _BROKEN_WORD.search(text) is not None and following[:1].islower()
        text = _BROKEN_WORD.sub("", text) + following if is_broken else f"{text} {following}"
    return text
