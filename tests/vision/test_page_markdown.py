"""Lines with places -> Markdown, without any document."""

from collections.abc import Sequence

import pytest

from mmserve.vision.page_markdown import escaped_lines, markdown_of
from mmserve.vision.reading_order import Line

PROSE = (
    "The committee met on Tuesday to discuss the budget for the coming",
    "year. Members agreed that repairs to the northern bridge cannot wait",
    "until spring.",
)


def line(text: str, left: float = 50, top: float = 100, *, height: float = 10, is_bold: bool = False) -> Line:
    """Characters are half as wide as they are high."""
    return Line(text, left, top, left + 0.5 * height * len(text), top + height, is_bold)


def below(texts: Sequence[str], *, left: float = 50, top: float = 100, pitch: float = 14) -> list[Line]:
    return [line(text, left, top + pitch * index) for index, text in enumerate(texts)]


def grid(rows: Sequence[Sequence[str]], *, lefts: Sequence[float], top: float = 100, pitch: float = 22) -> list[Line]:
    return [
        line(text, left, top + pitch * index)
        for index, row in enumerate(rows)
        for text, left in zip(row, lefts, strict=True)
        if text
    ]


def test_a_paragraph_is_one_line() -> None:
    assert markdown_of(below(PROSE)) == " ".join(PROSE)


def test_a_wider_gap_parts_paragraphs() -> None:
    lines = [*below(PROSE), *below(PROSE, top=100 + 3 * 14 + 8)]
    assert markdown_of(lines) == "\n\n".join([" ".join(PROSE)] * 2)


def test_an_indented_first_line_opens_a_paragraph() -> None:
    lines = [*below(PROSE), line("A vote was taken, and the proposal to hire an engineer accepted", 65, 142)]
    lines.append(line("without a dissenting voice.", 50, 156))
    assert markdown_of(lines).split("  \n")[0] == " ".join(PROSE)
    assert markdown_of(lines).endswith("engineer accepted without a dissenting voice.")


def test_a_word_that_a_line_end_broke_is_whole_again() -> None:
    lines = below(["The treasurer reported a surplus of 4,210 pounds after all in-", "voices were paid."])
    assert markdown_of(lines).endswith("all invoices were paid.")
    lines = below(["The treasurer reported a surplus of 4,210 pounds of the Anglo-", "Dutch society."])
    assert markdown_of(lines).endswith("Anglo- Dutch society.")


def test_lines_of_an_address_stay_lines() -> None:
    lines = [*below(PROSE, top=300), *below(["Northgate University", "Finance Office", "Durham DH1 4QA"])]
    assert markdown_of(lines).startswith("Northgate University  \nFinance Office  \nDurham DH1 4QA\n\n")


def test_headings_are_told_by_size_and_by_weight() -> None:
    lines = [
        line("Annual report", top=40, height=20),
        line("Water quality", top=75, height=14),
        *below(PROSE, top=100),
        line("Lead pipes", top=160, is_bold=True),
        *below(PROSE, top=174),
        line("Eleanor Whitcombe", top=240, is_bold=True),
        line("Chair", top=254),
    ]
    text = " ".join(PROSE)
    assert markdown_of(lines).split("\n\n") == [
        "# Annual report",
        "## Water quality",
        text,
        "### Lead pipes",
        text,
        "Eleanor Whitcombe  \nChair",
    ]


def test_a_heading_of_two_lines_is_one() -> None:
    lines = [line("Marsden Valley", top=40, height=20), line("Water Trust", top=64, height=20), *below(PROSE)]
    assert markdown_of(lines).startswith("# Marsden Valley Water Trust\n\n")


def test_a_table_with_a_header_and_an_empty_cell() -> None:
    rows = [["Part", "Number", "Price"], ["Door lock switch", "DLS-44", "£118.00"], ["Labour", "", "£225.00"]]
    table = "| Part | Number | Price |\n| --- | --- | ---: |\n| Door lock switch | DLS-44 | £118.00 |\n"
    lines = [*grid(rows, lefts=(50, 200, 300)), *below(PROSE, top=200)]
    assert markdown_of(lines) == f"{table}| Labour |  | £225.00 |\n\n{' '.join(PROSE)}"


def test_a_table_that_begins_with_its_first_row_has_an_empty_header() -> None:
    lines = grid([["Screws", "8.95"], ["Paint", "34.50"]], lefts=(50, 300), pitch=14)
    assert markdown_of(lines) == "|  |  |\n| --- | ---: |\n| Screws | 8.95 |\n| Paint | 34.50 |"


def test_a_cell_of_two_lines_is_one_cell() -> None:
    rows = [["Item", "Description"], ["A-1", "Flow meter with two"], ["B-2", "Cable"], ["C-3", "Logger"]]
    lines = [*grid(rows, lefts=(50, 150), pitch=40), line("inches of bore", 150, 152)]
    assert "| A-1 | Flow meter with two inches of bore |\n| B-2 | Cable |" in markdown_of(lines)


def test_rows_far_apart_are_a_table_where_their_cells_stand_under_one_another() -> None:
    lines = grid([["Field", "Area"], ["Orchard", "3.1"], ["Mill", "8.9"]], lefts=(50, 200), pitch=40)
    assert markdown_of(lines).count("\n") == 3


def test_two_columns_of_text_are_read_one_after_the_other() -> None:
    left = ["The committee met on Tuesday", "to discuss the budget for the", "coming year, and it agreed"]
    right = ["that repairs to the northern", "bridge cannot wait until the", "spring of the coming year."]
    lines = [line("A headline that runs across both of the columns of this page", top=70)]
    lines += [*below(left), *below(right, left=240)]
    assert markdown_of(lines).split("\n\n")[1:] == [" ".join(left), " ".join(right)]


def test_what_stands_beside_without_sharing_rows_is_read_apart() -> None:
    left = below(["Kestrel Instrument Works", "Unit 6, Millrace Yard", "Hexham NE46 3PJ"], top=100)
    right = grid([["Number", "2025-0417"], ["Date", "3 April"], ["Due", "3 May"]], lefts=(300, 380), top=105, pitch=14)
    text = markdown_of([*left, *right])
    assert text.startswith("Kestrel Instrument Works  \nUnit 6, Millrace Yard  \nHexham NE46 3PJ\n\n|")
    assert "| Number | 2025-0417 |\n| Date | 3 April |" in text


def test_list_items_keep_their_marks() -> None:
    lines = [line("•", 50, 100), line("Roof and walls", 70, 100), *below(["• Drains"], top=114)]
    assert markdown_of(lines) == "- Roof and walls\n- Drains"
    numbered = below(["1. Premises. The workshop on the ground floor of 8 Kiln Street,", "with a yard.", "2. Term."])
    assert markdown_of(numbered).splitlines() == [
        "1. Premises. The workshop on the ground floor of 8 Kiln Street, with a yard.",
        "2. Term.",
    ]


@pytest.mark.parametrize(
    ("text", "markdown"),
    [
        ("# not a heading", "\\# not a heading"),
        ("VISA ****4471", "VISA \\*\\*\\*\\*4471"),
        ("<!-- page 9 -->", "\\<!-- page 9 -->"),
        ("[see](javascript:x)", "[see\\](javascript:x)"),
        ("snake_case and _this_", "snake_case and \\_this\\_"),
        ("a &lt; b & c", "a \\&lt; b & c"),
        ("> quoted", "\\> quoted"),
        ("`code` ~~no~~", "\\`code\\` \\~~no\\~~"),
        ("a | b", "a | b"),
    ],
)
def test_what_spells_markdown_on_the_page_is_text(text: str, markdown: str) -> None:
    assert markdown_of([line(text)]) == markdown


def test_a_bar_in_a_cell_does_not_part_it() -> None:
    lines = grid([["Key", "Value"], ["a|b", "1"], ["c", "2"]], lefts=(50, 200))
    assert "| a\\|b | 1 |" in markdown_of(lines)


def test_nothing_is_nothing() -> None:
    assert markdown_of([]) == ""
    assert markdown_of([line("  ")]) == ""


def test_a_page_of_many_cells_is_laid_out_whole() -> None:
    rows = [[f"r{i}c{j}" for j in range(20)] for i in range(200)]
    text = markdown_of(grid(rows, lefts=[50 + 60 * j for j in range(20)], pitch=12))
    assert text.count("\n") == 201
    assert "| r199c0 | r199c1 |" in text


def test_plain_text_keeps_its_lines() -> None:
    assert escaped_lines("# One\ntwo\n\n\n3. three\n") == "\\# One  \ntwo\n\n3\\. three"
