"""A page -> stretches without columns beside each other, in the order in which a person reads them."""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from mmserve.vision.page_tables import Row
from mmserve.vision.reading_order import Line, rows_of

# White between two rows, as multiples of their height: more of it where both may be rows of a table.
_BLOCK_GAP, _TABLE_GAP = 2.2, 4.0
_CORRIDOR = 0.8
_WIDE_SHARE = 0.55
_MAX_SHARED_ROWS, _MIN_INDEPENDENT_ROWS = 0.3, 3
_LEVEL = 0.3
_MIN_COLUMN_ROWS, _MIN_COLUMN_SHARE, _MIN_FULL_SHARE = 3, 0.22, 0.6
# In heights of its lines: how wide a column of text is at least, and how far its lines are apart.
_MIN_WIDTH, _MAX_PITCH = 10.0, 1.8


class RightEdges:
    """How far lines go to the right that begin at a place, in a column or on a page that has none."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self._height = statistics.median(line.height for line in lines)
        self._edges: dict[int, float] = {}
        for line in lines:
            place = round(line.left / self._height)
            self._edges[place] = max(self._edges.get(place, -math.inf), line.right)

    def of(self, line: Line) -> float:
        place = round(line.left / self._height)
        return max(self._edges.get(place + step, -math.inf) for step in (-1, 0, 1))


@dataclass(frozen=True)
class Region:
    """Rows without columns beside each other, from the top. A table is not cut at its columns."""

    rows: list[list[Line]]
    right_edges: RightEdges


def regions_of(lines: Sequence[Line], right_edges: RightEdges | None = None) -> list[Region]:
    right_edges = right_edges or RightEdges(lines)
    halves = _columns(lines)
    if halves is not None:
        is_text = _are_running_text(*halves)
        return [region for half in halves for region in regions_of(half, RightEdges(half) if is_text else right_edges)]
    rows = rows_of(lines)
    stretches = _stretches(rows)
    if len(stretches) == 1:
        stretches = _bands(rows)
    if len(stretches) == 1:
        return [Region(rows, right_edges)]
    parts = [[line for row in stretch for line in row] for stretch in stretches]
    return [region for part in parts for region in regions_of(part, right_edges)]


def _stretches(rows: Sequence[list[Line]]) -> list[list[list[Line]]]:
    """Rows, parted where much white is between them: more of it between rows whose cells stand under one another."""
    stretches: list[list[list[Line]]] = [[rows[0]]]
    bottom = max(line.bottom for line in rows[0])
    for above, below in itertools.pairwise(rows):
        height = min(line.height for line in (*above, *below))
        most = _TABLE_GAP if _num_under(above, below) > 1 else _BLOCK_GAP
        if min(line.top for line in below) - bottom > most * height:
            stretches.append([])
        stretches[-1].append(below)
        bottom = max(bottom, *(line.bottom for line in below))
    return stretches


def _num_under(above: Row, below: Row) -> int:
    return sum(any(cell.left < other.right and other.left < cell.right for other in above) for cell in below)


def _bands(rows: Sequence[list[Line]]) -> list[list[list[Line]]]:
    """Rows in columns, parted from those that run across them: a headline over an article."""
    lines = [line for row in rows for line in row]
    width = max(line.right for line in lines) - min(line.left for line in lines)
    bands: list[list[list[Line]]] = [[]]
    for is_wide, group in itertools.groupby(rows, lambda row: any(line.width > _WIDE_SHARE * width for line in row)):
        band = list(group)
        if not is_wide and _columns([line for row in band for line in row]):
            bands += [band, []]
        else:
            bands[-1] += band
    return [band for band in bands if band]


def _columns(lines: Sequence[Line]) -> tuple[list[Line], list[Line]] | None:
    """Two halves with white between them that are read one after the other, rather than row by row as a table is."""
    by_left = sorted(lines, key=lambda line: line.left)
    gap = _CORRIDOR * statistics.median(line.height for line in lines)
    right = by_left[0].right
    for index, line in enumerate(by_left[1:], start=1):
        if line.left - right >= gap:
            halves = by_left[:index], by_left[index:]
            if _are_independent(*halves) or _are_running_text(*halves):
                return halves
        right = max(right, line.right)
    return None


def _are_independent(left: Sequence[Line], right: Sequence[Line]) -> bool:
    """Whether rows on one side hardly ever stand beside a row of the other."""
    fewest = min(len(rows_of(left)), len(rows_of(right)))
    if fewest < _MIN_INDEPENDENT_ROWS:
        return False
    num_shared = sum(any(_are_level(line, other) for other in right) for line in left)
    return num_shared <= _MAX_SHARED_ROWS * fewest


def _are_level(line: Line, other: Line) -> bool:
    return abs(line.center[1] - other.center[1]) < _LEVEL * min(line.height, other.height)


def _are_running_text(left: Sequence[Line], right: Sequence[Line]) -> bool:
    total = max(line.right for line in right) - min(line.left for line in left)
    return all(_is_running_text(half, total) for half in (left, right))


def _is_running_text(lines: Sequence[Line], total_width: float) -> bool:
    """Lines close below one another that mostly fill their column."""
    rows = rows_of(lines)
    width = max(line.right for line in lines) - min(line.left for line in lines)
    height = statistics.median(line.height for line in lines)
    is_wide = width >= max(_MIN_COLUMN_SHARE * total_width, _MIN_WIDTH * height)
    if len(rows) < _MIN_COLUMN_ROWS or not is_wide:
        return False
    pitches = [below[0].center[1] - above[0].center[1] for above, below in itertools.pairwise(rows)]
    is_full = statistics.median(line.width for line in lines) >= _MIN_FULL_SHARE * width
    return is_full and statistics.median(pitches) < _MAX_PITCH * height
