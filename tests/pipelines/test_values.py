import pytest

from mmserve.pipelines.sources import Sources
from mmserve.pipelines.values import Scalar, ValueFinder, says_nothing

INVOICE = (
    "Kestrel Instrument Works Ltd\nInvoice number 2025-0417\nInvoice date 3 April 2025\nVAT 20% £822.20\n"
    "Total due £4,933.20\nDr Amara Osei, “Hydrology” Field Store – Building C\nFee 0.125 EUR"
)
LETTER = (
    "Durham, 14/06/25. The deposit of 4.933,20 € is due on March 5, 2026. Two keys. Discount -3.13 and 1 200 sheets."
)


def found(value: Scalar, name: str = "value", pages: tuple[str, ...] = (INVOICE, LETTER)) -> tuple[int, ...]:
    sources = Sources()
    for number, text in enumerate(pages, start=1):
        sources.add(number, text)
    return ValueFinder(sources, range(1, len(pages) + 1)).find(value, name)


@pytest.mark.parametrize(
    ("value", "page"),
    [
        ("Kestrel Instrument Works Ltd", 1),
        ("kestrel  instrument WORKS ltd", 1),
        ("Kestrel Instrument Works Ltd.", 1),
        ("2025-0417", 1),
        ("£4,933.20", 1),
        ("4933.20", 1),
        (4933.2, 1),
        (822.2, 1),
        (20, 1),
        (0.125, 1),
        ("2025-04-03", 1),
        ("2025-04-03T00:00:00", 1),
        ("3 April 2025", 1),
        ('"hydrology" Field Store - Building C', 1),
        ("2025-06-14", 2),
        ("2026-03-05", 2),
        (-3.13, 2),
        (2, 2),
        ("Durham", 2),
    ],
)
def test_a_value_is_found_however_it_is_written(value: Scalar, page: int) -> None:
    assert found(value) == (page,)


@pytest.mark.parametrize(
    "value",
    [
        "Kestrel Instruments AG",
        "Martha Osei",
        "Kest",
        "2025-0418",
        "£4,933.21",
        "$4,933.20",
        4933,
        822,
        49,
        "2025-03-04",
        "2025-04-30",
        "2024-04-03",
        "4 April 2025",
        "",
        "...",
        float("nan"),
        float("inf"),
        True,
    ],
)
def test_what_stands_nowhere_is_not_found(value: Scalar) -> None:
    assert found(value) == ()


def test_of_several_pages_the_one_counts_where_the_name_is_near() -> None:
    pages = ("Till 59 of the shop.", "Receipt\nTOTAL 59", "Room 59")
    assert found(59, "total", pages) == (2,)
    assert found(59, "roomNumber", pages) == (3,)
    assert found(59, "invoice", pages) == (1,)


def test_only_the_pages_within_count() -> None:
    sources = Sources()
    sources.add(1, "Total 59")
    sources.add(2, "Total 60")
    assert ValueFinder(sources, [2, 7]).find(59, "total") == ()
    assert ValueFinder(sources, [2, 7]).find(60, "total") == (2,)


def test_ways_to_say_that_there_is_nothing() -> None:
    assert all(
        map(says_nothing, ["", " - ", "N/A", "null", "None.", "not specified", "Not in the document", "unknown"])
    )
    assert not any(map(says_nothing, ["Nathan", "Nordic Ltd", "Notary", "0", "Unknown Pleasures Ltd"]))
