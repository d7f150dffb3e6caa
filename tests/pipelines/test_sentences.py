import pytest

from mmserve.pipelines.sentences import StatementStream, clean_statement, page_sentences, split_sentences


@pytest.mark.parametrize(
    "sentence",
    [
        "Dr. Osei met Mr. Adeyemi at 4 p.m. in Durham.",
        "Am 14. März 2025 tagte der Verein Lindenhof e.V. im Saal.",
        "It rose by 3.8% to £27.6 million.",
        "J. K. Marsh signed it, see www.example.org for more.",
        "1. Bericht des Vorstands",
    ],
)
def test_a_full_stop_within_a_sentence_does_not_end_it(sentence: str) -> None:
    assert split_sentences(f"{sentence} Then more came.") == (
        [sentence, "Then more came."] if sentence.endswith(".") else [f"{sentence} Then more came."]
    )


def test_sentences_end_at_each_kind_of_mark() -> None:
    text = "Is it so? It is! He said “No.” Wir zahlen 27. Das ist gut. 会社です。水です。"
    expected = ["Is it so?", "It is!", "He said “No.”", "Wir zahlen 27.", "Das ist gut.", "会社です。", "水です。"]
    assert split_sentences(text) == expected


@pytest.mark.parametrize("mark", ["[p. 3]", "(p. 99)", "[pages 2 and 7]", "[page 3, 4]", "(S. 2)", "[pp. 1-4]"])
def test_page_marks_of_the_model_are_taken_out(mark: str) -> None:
    assert clean_statement(f"The rent is £5 {mark}.") == "The rent is £5."
    assert clean_statement(f"The rent {mark} is £5.") == "The rent is £5."


def test_other_brackets_and_numbers_stay() -> None:
    assert clean_statement("**Lead** (µg/l) was `4.1` [see 3].") == "Lead (µg/l) was 4.1 [see 3]."


def stream(text: str, size: int, *, is_cut: bool = False) -> list[tuple[str, bool]]:
    statements = StatementStream()
    found = [s for i in range(0, len(text), size) for s in statements.push(text[i : i + size])]
    return [(s.text, s.is_item) for s in [*found, *statements.finish(is_cut=is_cut)]]


ANSWER = (
    "Here is a summary:\n\n- Dr. Osei found 4.5 tonnes\nof lime. It is dear.\n* **Second** item [p. 4]\n"
    "2. Third item.\n\nAt the end, wrapped\nlines go on until 3. May 2025. Last one"
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_statements_do_not_depend_on_how_the_text_was_cut_into_deltas(size: int) -> None:
    assert stream(ANSWER, size) == [
        ("Here is a summary:", False),
        ("Dr. Osei found 4.5 tonnes of lime.", True),
        ("It is dear.", False),
        ("Second item", True),
        ("Third item.", True),
        ("At the end, wrapped lines go on until 3. May 2025.", False),
        ("Last one", False),
    ]


def test_an_unfinished_last_sentence_of_a_cut_answer_is_left_out() -> None:
    assert stream("One is whole. Two is", 4, is_cut=True) == [("One is whole.", False)]
    assert stream("One is whole. Two is too.", 4, is_cut=True)[-1] == ("Two is too.", False)


def test_a_statement_comes_as_soon_as_the_next_one_begins() -> None:
    statements = StatementStream()
    assert statements.push("It costs £4. Next") == []
    assert [s.text for s in statements.push(" o")] == ["It costs £4."]


def test_lines_that_the_layout_broke_are_joined_and_headings_and_rows_stay_alone() -> None:
    page = (
        "Annual report\n"
        "The trust supplies drinking water to 48,600 homes in nine par-\n"
        "ishes, and it pays no dividend to anybody ever. It is owned\n"
        "by members.\n"
        "Nitrate 50 18.3\n"
        "Lead 10 0.8\n"
    )
    assert page_sentences(page) == [
        "Annual report",
        "The trust supplies drinking water to 48,600 homes in nine parishes, and it pays no dividend to anybody ever.",
        "It is owned by members.",
        "Nitrate 50 18.3",
        "Lead 10 0.8",
    ]


def test_lines_of_a_narrow_receipt_are_not_joined() -> None:
    assert page_sentences("Hardware and Garden\n17 Tannery Street, Kendal\nTel 01632 960 733") == [
        "Hardware and Garden",
        "17 Tannery Street, Kendal",
        "Tel 01632 960 733",
    ]
