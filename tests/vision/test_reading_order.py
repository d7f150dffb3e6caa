import pytest

from mmserve.vision.reading_order import Line, quarter_turned, share_of_backward_steps, text_of


def line(text: str, left: float, top: float, width: float = 200, height: float = 10) -> Line:
    return Line(text, left, top, left + width, top + height)


def test_lines_are_read_from_the_top() -> None:
    assert text_of([line("c", 0, 40), line("a", 0, 0), line("b", 0, 20)]) == "a\nb\nc"


def test_cells_of_a_row_share_a_line() -> None:
    cells = [line("Price", 300, 1, 40), line("Item", 0, 0, 80), line("9.50", 300, 21, 30), line("Nut", 0, 20, 60)]
    assert text_of(cells) == "Item  Price\nNut  9.50"


def test_columns_are_read_one_after_the_other_below_their_title() -> None:
    left = [line(f"l{n}", 0, 30 + 15 * n) for n in range(5)]
    right = [line(f"r{n}", 230, 30 + 15 * n) for n in range(5)]
    mixed = [one for pair in zip(right, left, strict=True) for one in pair]
    title, foot = line("Title", 0, 0, 430), line("Foot", 0, 140, 430)
    expected = ["Title", *(f"l{n}" for n in range(5)), *(f"r{n}" for n in range(5)), "Foot"]
    assert text_of([foot, *mixed, title]).splitlines() == expected


def test_three_columns() -> None:
    columns = [[line(f"{c}{n}", 150 * i, 15 * n, 130) for n in range(4)] for i, c in enumerate("abc")]
    rows = [one for row in zip(*columns, strict=True) for one in row]
    assert text_of(rows).split() == [f"{c}{n}" for c in "abc" for n in range(4)]


def test_a_table_with_narrow_columns_is_not_torn_apart() -> None:
    cells = [cell for n in range(6) for cell in (line(f"item{n}", 0, 20 * n, 180), line(f"{n}.00", 400, 20 * n, 40))]
    assert text_of(cells).splitlines() == [f"item{n}  {n}.00" for n in range(6)]


def test_disorder_is_measured() -> None:
    lines = [line(str(n), 0, 20 * n) for n in range(5)]
    assert share_of_backward_steps(lines) == 0.0
    assert share_of_backward_steps(lines[::-1]) == 1.0
    assert share_of_backward_steps([]) == 0.0
    second_column = [line(str(n), 300, 20 * n) for n in range(5)]
    assert share_of_backward_steps(lines + second_column) == 0.0


@pytest.mark.parametrize("turns", range(4))
def test_four_quarters_are_a_whole_turn(turns: int) -> None:
    original = line("x", 10, 20, 30, 5)
    turned = quarter_turned(original, turns)
    assert quarter_turned(turned, 4 - turns) == original
    assert (turned.width, turned.height) == ((30, 5) if turns % 2 == 0 else (5, 30))


def test_no_lines_make_no_text() -> None:
    assert text_of([]) == ""


def test_what_stands_side_by_side_is_read_from_the_right_where_text_runs_to_the_left() -> None:
    assert text_of([Line("בית", 0, 0, 50, 10), Line("ספר", 60, 0, 100, 10)]) == "ספר  בית"


def test_columns_are_read_from_the_right_where_text_runs_to_the_left() -> None:
    left = [Line(f"שמאל {n}", 0, 20 * n, 90, 20 * n + 10) for n in range(4)]
    right = [Line(f"ימין {n}", 110, 20 * n, 200, 20 * n + 10) for n in range(4)]
    assert text_of([*left, *right]).splitlines() == [f"ימין {n}" for n in range(4)] + [f"שמאל {n}" for n in range(4)]
