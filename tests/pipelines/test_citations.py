import pytest

from mmserve.pipelines.citations import CitationFinder
from mmserve.pipelines.sources import Sources

PAGES = {
    1: "The Thornbeck renewal costs £18.4 million over four years. The board approved it on 12 September 2024.\n"
    "The board is chaired by Eleanor Whitcombe. Rajiv Menon is chief executive. The hall may be used.",
    2: "Leakage fell to 14.2% of the water put into supply, from 16.8% the year before.\n"
    "We renewed 23.7 kilometres of main. Repairs took 19 weeks instead of the 14 planned.\n"
    "If the work starts on 21 July 2025 it can be finished within the holiday. Warranty lasts 24 months.\n"
    "The landlord keeps the roof and the drains in repair. The tenant keeps the inside.",
    4: "Lead 10 0.8 4.1\nNitrate 50 18.3 31.0\nInvoice 2025-0417 for item FM-210 is due on 3 May 2025. Total £4,111.00",
    5: "Der Überschuss von 2.440 Euro fließt in die Rücklage.\n"
    "Die Stadt Göttingen fördert das Vorhaben mit 40 Prozent.\n"
    "Sabine Köhler leitete am 14. März 2025 die Versammlung und war.",
}


@pytest.fixture(scope="module")
def finder() -> CitationFinder:
    sources = Sources()
    for number, text in PAGES.items():
        sources.add(number, text)
    return CitationFinder(sources)


@pytest.mark.parametrize(
    ("statement", "pages"),
    [
        ("The renewal of Thornbeck will cost £18.4 million over four years.", (1,)),
        ("On 12 September 2024, the board approved the Thornbeck renewal.", (1,)),
        ("Leakage fell from 16.8 percent to 14.2 percent.", (2,)),
        ("The board approved the Thornbeck renewal on 12 September 2024.", (1,)),
        ("Leakage fell to 14.2%, and 23.7 kilometres of main were renewed.", (2,)),
        ("They renewed 23.7 kilometres of main.", (2,)),
        ("The repair took 19 weeks.", (2,)),
        ("The landlord keeps the roof in repair.", (2,)),
        ("The total of the invoice is £4,111.", (4,)),
        ("Invoice 2025-0417 is due on May 3, 2025.", (4,)),
        ("Nitrate was 18.3, at most 31.", (4,)),
        ("Der Überschuss von 2440 Euro fließt in die Rücklage.", (5,)),
        ("The meeting of 14 March 2025 was chaired by Sabine Köhler.", (5,)),
        ("The renewal costs £18.4 million and leakage fell to 14.2%.", (1, 2)),
    ],
)
def test_a_statement_is_cited_from_the_page_where_it_was_read(
    finder: CitationFinder, statement: str, pages: tuple[int, ...]
) -> None:
    assert finder.find(statement) == pages


@pytest.mark.parametrize(
    ("statement", "why"),
    [
        ("The renewal costs £19.4 million over four years.", "the number is on no page"),
        ("The renewal costs $18.4 million over four years.", "another currency"),
        ("Leakage fell to 14.2 of the water put into supply.", "a percentage is no plain number"),
        ("The board is chaired by Eleanor Menon.", "two names mixed"),
        ("The board is chaired by Martha Whitcombe.", "the name is on no page"),
        ("Zephyr approved the renewal on 12 September 2024.", "an invented name at the start"),
        ("The work can be finished within 21 days.", "the number means something else"),
        ("The warranty of 14 months lasts.", "the unit belongs to another number"),
        ("The tenant keeps the roof and the drains in repair.", "it is said of somebody else"),
        ("The hall may not be used.", "the negation is not on the page"),
        ("Leakage made customers angry and drove many of them away.", "hardly a word of it is on a page"),
        ("The renewal began on 12 October 2024.", "another month"),
        ("The board rejected the £18.4 million because leakage fell by 16.8%.", "mixed from two pages"),
        ("Leakage fell to 14.2% on 21 July 2025.", "the numbers are of two sentences"),
        ("Der Überschuss floss am 14. März 2025.", "the date is of something else"),
        ("Die Versammlung hatte 40 Prozent.", "the percentage is of something else"),
        ("Die Rücklage hat 40 Euro.", "the unit is of another number"),
        ("Die Stadt Hannover fördert das Vorhaben mit 40 Prozent.", "another town"),
        ("The document has details on page 99.", "a page number is a number too"),
        ("", "nothing"),
        ("And so on.", "nothing that could be looked up"),
    ],
)
def test_a_statement_that_was_not_read_is_not_cited(finder: CitationFinder, statement: str, why: str) -> None:
    assert finder.find(statement) == (), why


def test_only_pages_of_the_part_are_looked_at() -> None:
    sources = Sources()
    for number, text in PAGES.items():
        sources.add(number, text)
    statement = "Leakage fell to 14.2%."
    assert CitationFinder(sources, within=[1, 4]).find(statement) == ()
    assert CitationFinder(sources, within=[1, 2]).find(statement) == (2,)


def test_the_earlier_page_is_cited_where_two_say_the_same() -> None:
    sources = Sources()
    for number in (3, 7):
        sources.add(number, "The rent is £1,875 a month.")
    assert CitationFinder(sources).find("The rent is £1,875 a month.") == (3,)


def test_a_translation_without_names_and_numbers_is_beyond_checking(finder: CitationFinder) -> None:
    sources = Sources()
    sources.add(1, PAGES[5])
    german = CitationFinder(sources)
    assert german.is_beyond_checking("The members were happy with what they had heard and with the result.")
    assert not german.is_beyond_checking("The members were happy with the surplus of 2,440 that they had.")
    assert not finder.is_beyond_checking("The members were happy with what they had heard and with the result.")


def test_many_pages_are_looked_up_without_being_held() -> None:
    sources = Sources()
    for number in range(1, 301):
        sources.add(number, f"Item {number} costs {number * 7} pounds in the town of Fernhill.")
    assert CitationFinder(sources).find("Item 123 costs 861 pounds.") == (123,)
