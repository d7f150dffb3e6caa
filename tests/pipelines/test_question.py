import pytest

from mmserve.pipelines.question import Asked, Question
from mmserve.pipelines.sources import Sources

INVOICE = (
    "Invoice number 2025-0417\nInvoice date 3 April 2025\nPayment due 3 May 2025\nSubtotal £4,111.00\n"
    "Total due £4,933.20\nQuestions about this invoice go to Priya Raman in accounts.\nWhen is the payment due?"
)
RECEIPT = "Served by: Mateus\nPaint brush 50 mm  6.20\nTOTAL GBP  59.47\nReturns within 28 days with this receipt"


def plain_answer(question: str, *pages: str) -> tuple[int, str] | None:
    sources = Sources()
    for number, text in enumerate(pages, start=1):
        sources.add(number, text)
    answer = Question(question).plain_answer(sources)
    return None if answer is None else (answer.page, answer.text)


@pytest.mark.parametrize(
    ("question", "asked"),
    [
        ("When does it end?", "date"),
        ("What is the date of the invoice?", "date"),
        ("How much is it?", "amount"),
        ("What was the total amount?", "amount"),
        ("Wie hoch ist die Miete?", "amount"),
        ("How many people came?", "number"),
        ("What is the invoice number?", "number"),
        ("Who pays the rent?", "anything"),
        ("Who set the date?", "anything"),
    ],
)
def test_the_words_say_what_kind_of_thing_is_asked_for(question: str, asked: Asked) -> None:
    assert Question(question).asked == asked


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("When is the payment due?", (1, "Payment due 3 May 2025")),
        ("What is the total amount due?", (1, "Total due £4,933.20")),
        ("What is the invoice date?", (1, "Invoice date 3 April 2025")),
        ("What is the invoice number?", (1, "Invoice number 2025-0417")),
        ("What is the total?", (2, "TOTAL GBP 59.47")),
    ],
)
def test_a_line_that_has_all_that_is_asked_about_and_the_kind_of_thing_answers(
    question: str, answer: tuple[int, str]
) -> None:
    found = plain_answer(question, *((INVOICE,) if answer[0] == 1 else ("Nothing of it.", RECEIPT)))
    assert found is not None
    assert (found[0], " ".join(found[1].split())) == answer


@pytest.mark.parametrize(
    "question", ["Who is the cashier's mother?", "What is the deposit?", "When was the total paid?", "Receipt?", ""]
)
def test_no_line_answers_in_half(question: str) -> None:
    assert plain_answer(question, RECEIPT) is None
