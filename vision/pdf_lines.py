"""Characters of a PDF page -> lines, whichever way the text runs. pdfium's own lines fail on pages that are turned."""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from mmserve.vision.reading_order import Line, is_right_to_left, quarter_turned

GENERATED = "\r\n\x02 "
# what stands for a glyph of which the document does not say what it means
UNKNOWN = "\ufffd"
_LINE_STEP = 0.6
_WORD_GAP = 0.3


@dataclass(frozen=True)
class PlacedCharacter:
    """`box` is left, top, right, bottom in points of the view; None for what pdfium put in (spaces, line ends)."""

    character: str
    box: tuple[float, float, float, float] | None
    is_bold: bool = False


def lines_of(characters: Sequence[PlacedCharacter], *, cell_gap: float = math.inf) -> tuple[list[Line], int]:
    """Lines in the view, in the order of `characters`; and by how many quarter turns they must be turned to run right.

    Quarter turns are counter-clockwise. A line ends where white wider than `cell_gap` times its height follows, so that
    the cells of a table are lines of their own.
    """
    turns = _quarter_turns_to_upright(characters)
    lines: list[Line] = []
    current: list[PlacedCharacter] = []
    for placed in characters:
        if current and _starts_line(current, placed, turns, cell_gap):
            lines += _line(current, turns)
            current = []
        current.append(placed)
    return lines + _line(current, turns), turns


def _quarter_turns_to_upright(characters: Sequence[PlacedCharacter]) -> int:
    """From where most characters stand beside the one before them."""
    votes = [0, 0, 0, 0]
    for before, after in itertools.pairwise(characters):
        if before.box is None or after.box is None:
            continue
        step_x = after.box[0] + after.box[2] - before.box[0] - before.box[2]
        step_y = after.box[1] + after.box[3] - before.box[1] - before.box[3]
        is_across = abs(step_x) >= abs(step_y)
        turns = (0 if step_x >= 0 else 2) if is_across else (1 if step_y >= 0 else 3)
        votes[(turns + 2) % 4 if _both_run_to_the_left(before, after) else turns] += 1
    return votes.index(max(votes))


def _starts_line(current: Sequence[PlacedCharacter], placed: PlacedCharacter, turns: int, cell_gap: float) -> bool:
    if current[-1].character in ("\n", "\x02"):
        return True
    last = next((one for one in reversed(current) if one.box is not None), None)
    if placed.box is None or last is None or last.box is None:
        return False
    a, b = _upright(last, turns), _upright(placed, turns)
    height = max(a.height, b.height, 1e-6)
    is_apart = max(b.left - a.right, a.left - b.right) > cell_gap * height
    if is_apart or abs(a.center[1] - b.center[1]) > _LINE_STEP * height:
        return True
    # Among letters that run to the left, a number that runs to the right is left behind in one step.
    runs_right = not any(_runs_to_the_left(one) for one in (*current, placed))
    return runs_right and b.right < a.left - 2 * height


def _line(characters: Sequence[PlacedCharacter], turns: int) -> list[Line]:
    boxes = [one.box for one in characters if one.box is not None]
    text = _with_gaps(characters, turns).strip(" \r\n")
    if not boxes or not text:
        return []
    left, top, right, bottom = zip(*boxes, strict=True)
    is_bold = all(one.is_bold for one in characters if one.box is not None and not one.character.isspace())
    return [Line(text, min(left), min(top), max(right), max(bottom), is_bold)]


def _with_gaps(characters: Sequence[PlacedCharacter], turns: int) -> str:
    """The text, with a space where words stand apart and pdfium put none."""
    heights = [_upright(one, turns).height for one in characters if one.box is not None]
    gap = _WORD_GAP * statistics.median(heights) if heights else 0.0
    text = ""
    for before, after in zip([None, *characters], characters, strict=False):
        if before is not None and before.box is not None and after.box is not None:
            first, second = _upright(before, turns), _upright(after, turns)
            if _both_run_to_the_left(before, after):
                first, second = second, first
            text += " " if second.left - first.right > gap else ""
        text += after.character
    return text


def _runs_to_the_left(placed: PlacedCharacter) -> bool:
    return placed.character != "" and is_right_to_left(placed.character)


def _both_run_to_the_left(before: PlacedCharacter, after: PlacedCharacter) -> bool:
    return _runs_to_the_left(before) and _runs_to_the_left(after)


def _upright(placed: PlacedCharacter, turns: int) -> Line:
    assert placed.box is not None
    return quarter_turned(Line(placed.character, *placed.box), turns)
