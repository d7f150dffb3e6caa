"""Lines with places -> text in the order in which a person reads it."""

import itertools
import statistics
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

_WIDE_SHARE = 0.55
_MIN_COLUMN_SHARE = 0.22
_MIN_COLUMN_LINES = 3


@dataclass(frozen=True)
class Line:
    """A run of text on one baseline, in any unit with y pointing down."""

    text: str
    left: float
    top: float
    right: float
    bottom: float
    is_bold: bool = False

    @property
    def width(self) -> float:
        return self.right - self.left

    @property
    def height(self) -> float:
        return self.bottom - self.top

    @property
    def center(self) -> tuple[float, float]:
        return (self.left + self.right) / 2, (self.top + self.bottom) / 2


def is_right_to_left(character: str) -> bool:
    return unicodedata.bidirectional(character) in ("R", "AL")


def text_of(lines: Sequence[Line]) -> str:
    """Columns one after another, top to bottom; what stands side by side in a table becomes one line of text."""
    return "\n".join("  ".join(line.text for line in row) for row in rows_in_order(lines))


def quarter_turned(line: Line, turns: int) -> Line:
    """`line` turned counter-clockwise about the origin, `turns` times a quarter."""
    left, top, right, bottom = line.left, line.top, line.right, line.bottom
    for _ in range(turns % 4):
        left, top, right, bottom = top, -right, bottom, -left
    return Line(line.text, left, top, right, bottom, line.is_bold)


def rows_in_order(lines: Sequence[Line]) -> list[list[Line]]:
    if not lines:
        return []
    split = _split_at_gutter(lines)
    if split is not None:
        first, second = reversed(split) if _run_to_the_left(lines) else split
        return rows_in_order(first) + rows_in_order(second)
    bands = _bands(lines)
    if len(bands) == 1:
        return rows_of(lines)
    return [row for band in bands for row in rows_in_order(band)]


def are_mostly_upright_strips(lines: Sequence[Line]) -> bool:
    """Whether most of the text runs up or down."""
    strips = sum(line.height for line in lines if line.height > 1.5 * line.width)
    return bool(lines) and strips > 0.5 * sum(max(line.width, line.height) for line in lines)


def share_of_backward_steps(lines: Sequence[Line]) -> float:
    """How often the next line stands above the one before it in the same column: 0 where the order is a reader's."""
    steps = list(itertools.pairwise(lines))
    backward = sum(b.bottom <= a.top and b.left < a.right and a.left < b.right for a, b in steps)
    return backward / len(steps) if steps else 0.0


def _bands(lines: Sequence[Line]) -> list[list[Line]]:
    """Lines that span most of the width (titles) part a page into bands, each with its own columns."""
    width = max(line.right for line in lines) - min(line.left for line in lines)
    ordered = sorted(lines, key=lambda line: line.center[1])
    bands: list[list[Line]] = [[]]
    for line in ordered:
        is_wide = line.width > _WIDE_SHARE * width
        if bands[-1] and is_wide != (bands[-1][-1].width > _WIDE_SHARE * width):
            bands.append([])
        bands[-1].append(line)
    return bands if any(_split_at_gutter(band) for band in bands) else [list(lines)]


def _split_at_gutter(lines: Sequence[Line]) -> tuple[list[Line], list[Line]] | None:
    """Two halves beside each other with white between them, each a column of running text and not of table cells."""
    if len(lines) < 2 * _MIN_COLUMN_LINES:
        return None
    by_left = sorted(lines, key=lambda line: line.left)
    total = max(line.right for line in lines) - by_left[0].left
    gap = 0.8 * statistics.median(line.height for line in lines)
    right = by_left[0].right
    for index, line in enumerate(by_left[1:], start=1):
        halves = by_left[:index], by_left[index:]
        if line.left - right >= gap and all(_is_column(half, total) for half in halves):
            return halves
        right = max(right, line.right)
    return None


def _is_column(lines: Sequence[Line], total_width: float) -> bool:
    is_long_enough = len(lines) >= _MIN_COLUMN_LINES
    return is_long_enough and statistics.median(line.width for line in lines) >= _MIN_COLUMN_SHARE * total_width


def rows_of(lines: Sequence[Line]) -> list[list[Line]]:
    """What stands side by side, from the left; from the top."""
    rows: list[list[Line]] = []
    for line in sorted(lines, key=lambda line: line.center[1]):
        last = rows[-1][-1] if rows else None
        if last is not None and abs(last.center[1] - line.center[1]) < 0.5 * min(last.height, line.height):
            rows[-1].append(line)
        else:
            rows.append([line])
    return [_along(row) for row in rows]


def _along(row: Sequence[Line]) -> list[Line]:
    return sorted(row, key=lambda line: line.left, reverse=_run_to_the_left(row))


def _run_to_the_left(lines: Sequence[Line]) -> bool:
    letters = [is_right_to_left(character) for line in lines for character in line.text if character.isalpha()]
    return 2 * sum(letters) > len(letters)
