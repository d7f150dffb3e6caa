"""Rows of a page whose cells stand under one another -> tables. Told by places alone, whoever drew or scanned it."""

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from mmserve.vision.reading_order import Line

Row = Sequence[Line]
Span = tuple[float, float]
_MIN_CORRIDOR = 0.6
_WRAPPED_GAP = 0.6
_NUMBER = re.compile(r"[£$€¥]?\s?[-+−(]?\s?[£$€¥]?\d[\d.,:/\u00a0 ]*\s?[)%€]?|[-–—]|none|n/a", re.IGNORECASE)
_NUMERIC_SHARE = 0.6


@dataclass(frozen=True)
class Table:
    """Cells by row, all rows of one length. `is_numeric` says of each column whether its cells are numbers.

    `has_header` is False where the first row is one like the others.
    """

    rows: tuple[tuple[str, ...], ...]
    is_numeric: tuple[bool, ...]
    has_header: bool


def table_at(rows: Sequence[Row]) -> tuple[Table, int] | None:
    """The table that begins with the first of `rows`, and how many rows it takes; None where none begins there.

    Two rows of cells make a table at least. A row ends it that runs across its columns.
    """
    taken, columns = _aligned(rows)
    while taken and len(taken[-1]) == 1 and not _is_wrapped(taken, len(taken) - 1):
        taken.pop()
    if sum(len(row) > 1 for row in taken) < 2:
        return None
    cells = _cells(taken, columns)
    is_numeric = tuple(_is_numeric([row[i] for row in cells[1:]]) for i in range(len(columns)))
    return Table(tuple(cells), is_numeric, _has_header(taken, cells)), len(taken)


def _aligned(rows: Sequence[Row]) -> tuple[list[Row], list[Span]]:
    """Rows whose cells keep to columns, and these: stretches of the width with white between them all the way down."""
    if not rows or len(rows[0]) < 2:
        return [], []
    corridor = _MIN_CORRIDOR * statistics.median(cell.height for cell in rows[0])
    taken: list[Row] = []
    columns: list[Span] = []
    for row in rows:
        widened = _with_row(columns, row, corridor)
        if widened is None:
            break
        columns = widened
        taken.append(row)
    return taken, columns


def _with_row(columns: Sequence[Span], row: Row, corridor: float) -> list[Span] | None:
    """The columns with a row's cells in them; None if a cell bridges two, two share one, or one stands alone beside."""
    cells = [(cell.left, cell.right) for cell in row]
    merged: list[tuple[Span, int, int]] = []
    for left, right, num_columns, num_cells in sorted([(*c, 1, 0) for c in columns] + [(*c, 0, 1) for c in cells]):
        if merged and left - merged[-1][0][1] < corridor:
            (start, end), before, inside = merged[-1]
            merged[-1] = ((start, max(end, right)), before + num_columns, inside + num_cells)
        else:
            merged.append(((left, right), num_columns, num_cells))
    is_beside = len(row) == 1 and len(merged) > len(columns) > 0
    is_torn = any(num_columns > 1 or num_cells > 1 for _, num_columns, num_cells in merged)
    return None if is_torn or is_beside else [span for span, _, _ in merged]


def _column_of(cell: Line, columns: Sequence[Span]) -> int:
    return next(i for i, (left, right) in enumerate(columns) if left <= cell.center[0] <= right)


def _cells(rows: Sequence[Row], columns: Sequence[Span]) -> list[tuple[str, ...]]:
    cells: list[list[str]] = []
    for index, row in enumerate(rows):
        texts = [""] * len(columns)
        for cell in row:
            texts[_column_of(cell, columns)] = cell.text.strip()
        if index and _is_wrapped(rows, index):
            cells[-1] = [" ".join(part for part in pair if part) for pair in zip(cells[-1], texts, strict=True)]
        else:
            cells.append(texts)
    return [tuple(row) for row in cells]


def _is_wrapped(rows: Sequence[Row], index: int) -> bool:
    """Whether a row goes on in the cells of the one before it: it has fewer cells, and is closer than rows are."""
    if index == 0 or len(rows[index]) >= len(rows[index - 1]):
        return False
    gaps = [_gap(rows[i - 1], rows[i]) for i in range(1, len(rows)) if len(rows[i]) > 1]
    height = statistics.median(cell.height for cell in rows[index])
    usual = statistics.median(gaps) if gaps else 0.0
    return usual > _WRAPPED_GAP * height and _gap(rows[index - 1], rows[index]) < _WRAPPED_GAP * usual


def _gap(above: Row, below: Row) -> float:
    return min(cell.top for cell in below) - max(cell.bottom for cell in above)


def _is_numeric(texts: Sequence[str]) -> bool:
    filled = [text for text in texts if text]
    numbers = sum(_is_number(text) for text in filled)
    return bool(filled) and numbers >= _NUMERIC_SHARE * len(filled)


def _is_number(text: str) -> bool:
    return _NUMBER.fullmatch(text) is not None


def _has_header(rows: Sequence[Row], cells: Sequence[Sequence[str]]) -> bool:
    """A first row in bold over others, or one of words over columns of numbers."""
    is_bold = [all(cell.is_bold for cell in row) for row in rows]
    if is_bold[0] and not all(is_bold):
        return True
    has_digits = [any(any(c.isdigit() for c in text) for text in row) for row in cells]
    return not has_digits[0] and any(has_digits[1:])
