from mmserve.pipelines.extracts import choose_extracts
from mmserve.pipelines.repetition import Novelty
from mmserve.pipelines.sources import Sources


def sources_of(*pages: str) -> Sources:
    sources = Sources()
    for number, text in enumerate(pages, start=1):
        sources.add(number, text)
    return sources


REPORT = sources_of(
    "Annual report\nThe trust supplies drinking water to 48,600 homes in nine parishes.\nIt rained.",
    "It also was wet. The board approved the Thornbeck renewal on 12 September 2024.\nWe thank you for all of it.",
    "Leakage fell to 14.2% of the water, from 16.8%. They went on with it for the rest.\nAshcombe, 3 Weir Street.",
)


def test_sentences_with_figures_and_names_are_chosen_across_the_pages_in_their_order() -> None:
    chosen = choose_extracts(REPORT, 3, novelty=Novelty())
    assert [(extract.page, extract.text) for extract in chosen] == [
        (1, "The trust supplies drinking water to 48,600 homes in nine parishes."),
        (2, "The board approved the Thornbeck renewal on 12 September 2024."),
        (3, "Leakage fell to 14.2% of the water, from 16.8%."),
    ]


def test_what_was_said_and_pages_that_were_cited_come_last() -> None:
    novelty = Novelty()
    novelty.remember("Leakage fell to 14.2% of the water, from 16.8%.")
    chosen = choose_extracts(REPORT, 1, novelty=novelty, cited_pages=[1, 1, 1])
    assert [extract.page for extract in chosen] == [2]


def test_only_some_pages_can_be_asked_for() -> None:
    assert {extract.page for extract in choose_extracts(REPORT, 9, novelty=Novelty(), within=[2])} == {2}


def test_a_sentence_that_stands_on_each_page_is_a_header() -> None:
    header = "This is the report of the trust for the year.\n"
    sources = sources_of(header + "The rent is £5 for each of them.", header + "The fee is £6 for all of us.")
    texts = [extract.text for extract in choose_extracts(sources, 9, novelty=Novelty())]
    assert texts == ["The rent is £5 for each of them.", "The fee is £6 for all of us."]


def test_a_receipt_gives_its_heading_and_the_lines_that_matter() -> None:
    sources = sources_of("HARROW & PINE\nTill 3\nPaint 34.50\n59.47\nTOTAL GBP 59.47\nThank you\nDate 14/06/2025")
    texts = [extract.text for extract in choose_extracts(sources, 3, novelty=Novelty())]
    assert texts == ["HARROW & PINE", "TOTAL GBP 59.47", "Date 14/06/2025"]


def test_the_total_of_an_invoice_goes_with_its_prose() -> None:
    sources = sources_of(
        "Total due £4,933.20\nTotal income 27.6 26.6\nPlease pay by transfer within 30 days to the bank.\n"
        "Questions about this go to Priya Raman in accounts."
    )
    texts = [extract.text for extract in choose_extracts(sources, 2, novelty=Novelty())]
    assert texts == ["Total due £4,933.20", "Please pay by transfer within 30 days to the bank."]


def test_nothing_is_asked_for_or_there() -> None:
    assert choose_extracts(REPORT, 0, novelty=Novelty()) == []
    assert choose_extracts(sources_of(), 3, novelty=Novelty()) == []
