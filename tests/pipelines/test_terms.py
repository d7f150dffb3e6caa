import pytest

from mmserve.pipelines.terms import claims_of, number_keys, stem, terms_of


@pytest.mark.parametrize(
    ("written", "keys"),
    [
        ("4,111.00", ["4111"]),
        ("8.450", ["8450"]),
        ("1.234.567", ["1234567"]),
        ("2.50", ["2.5"]),
        ("2,5", ["2.5"]),
        ("£".strip("£") + "12,900", ["12900"]),
        ("14/06/2025", ["14", "6", "2025"]),
        ("2025-0417", ["2025", "417"]),
        ("10:42", ["10", "42"]),
        ("007", ["7"]),
        ("000", ["0"]),
    ],
)
def test_numbers_are_equal_however_they_are_written(written: str, keys: list[str]) -> None:
    assert number_keys(written) == keys


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("14 March 2025", "14. März 2025"),
        ("14 mars 2025", "14 March 2025"),
        ("two", "2"),
        ("zwölf", "12"),
        ("20%", "20 %"),
        ("FM-210", "fm210"),
        ("Calder’s", "calder"),
        ("3 May", "3 mai"),
    ],
)
def test_spellings_of_one_thing_share_their_keys(one: str, other: str) -> None:
    assert [term.key for term in terms_of(one)] == [term.key for term in terms_of(other)]


@pytest.mark.parametrize(("one", "other"), [("20%", "20"), ("March", "March 3"), ("15", "CB-15"), ("4.5", "45")])
def test_different_things_have_different_keys(one: str, other: str) -> None:
    assert terms_of(one)[0].key != terms_of(other)[0].key


def test_a_month_is_a_word_where_no_number_is_near() -> None:
    assert [term.kind for term in terms_of("They march on. It may rain.")].count("number") == 0


def test_stems_join_forms_of_a_word_and_keep_short_words() -> None:
    assert stem("inspected") == stem("inspection") == stem("inspects")
    assert stem("repair") == stem("repaired") == stem("repairs")
    assert stem("lease") != stem("least")
    assert stem("rose") == "rose"


def test_names_are_told_from_the_first_word_of_a_sentence() -> None:
    kinds = {term.text: term.kind for term in claims_of("Leakage fell under Siobhan Kelleher, says the trust.")}
    assert kinds == {"Leakage": "word", "fell": "word", "Siobhan": "name", "Kelleher": "name", "trust": "word"}
    assert claims_of("Eleanor Whitcombe spoke.")[0].kind == "name"


def test_only_a_word_right_after_a_number_is_its_unit() -> None:
    claims = {term.text: term.follows_number for term in claims_of("A 24-month warranty of 30 days, 5, meters")}
    assert claims == {
        "24": False,
        "month": True,
        "warranty": False,
        "30": False,
        "days": True,
        "5": False,
        "meters": False,
    }


def test_text_without_spaces_is_cut_into_pairs_of_characters() -> None:
    assert [term.key for term in terms_of("会社は水")] == ["会社", "社は", "は水"]
