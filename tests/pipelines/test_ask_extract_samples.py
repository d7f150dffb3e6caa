"""A sample through the real engine and the embedded model: whatever it imagines, what is cited stands on the page."""

import asyncio
from pathlib import Path

import pytest

from mmserve.config import CacheConfig, EngineConfig
from mmserve.engine.client import EngineClient
from mmserve.engine.prompt_builder import PromptBuilder
from mmserve.pipelines.ask import NOT_FOUND, AnswerResult, AskOptions, ask
from mmserve.pipelines.extract import ExtractionResult, ExtractOptions, extract
from mmserve.vision.pages import PageReader

# A model works through all samples, however many cores there are for it.
pytestmark = pytest.mark.timeout(900)

INVOICE = Path(__file__).parents[2] / "samples" / "invoice.pdf"
DUE, FRANCE = "What is the total amount due?", "Who is the president of France?"


async def _results(model: str) -> tuple[AnswerResult, AnswerResult, ExtractionResult]:
    client = EngineClient.start(EngineConfig(model=model, cache=CacheConfig(memory_bytes=1 << 30)))
    try:
        await asyncio.to_thread(client.wait_until_ready)
        prompts = PromptBuilder(client.tokenizer)
        async with PageReader(num_workers=1) as reader:
            asked = (
                ask(INVOICE, engine=client, prompts=prompts, reader=reader, options=AskOptions(question=question))
                for question in (DUE, FRANCE)
            )
            options = ExtractOptions(fields="vendor,invoice number", max_tokens=300)
            extracted = extract(INVOICE, engine=client, prompts=prompts, reader=reader, options=options)
            due, france, values = await asyncio.gather(*asked, extracted)
    finally:
        await asyncio.to_thread(client.close)
    assert isinstance(due, AnswerResult)
    assert isinstance(france, AnswerResult)
    assert isinstance(values, ExtractionResult)
    return due, france, values


@pytest.fixture(scope="module")
def outcome(smollm2_path: Path) -> tuple[AnswerResult, AnswerResult, ExtractionResult]:
    return asyncio.run(_results(str(smollm2_path)))


def test_what_the_document_says_is_answered_with_its_page(
    outcome: tuple[AnswerResult, AnswerResult, ExtractionResult],
) -> None:
    due = outcome[0]
    assert due.found
    assert "£4,933.20" in due.text
    assert [citation.pages for citation in due.citations] == [(1,)]


def test_what_it_does_not_say_is_not_answered(outcome: tuple[AnswerResult, AnswerResult, ExtractionResult]) -> None:
    assert (outcome[1].found, outcome[1].text, outcome[1].citations) == (False, NOT_FOUND, ())


def test_values_fit_the_schema_and_stand_on_the_page(
    outcome: tuple[AnswerResult, AnswerResult, ExtractionResult],
) -> None:
    extraction = outcome[2]
    assert extraction.is_valid
    assert list(extraction.data) == ["vendor", "invoice number"]
    assert extraction.data["vendor"] == "Kestrel Instrument Works Ltd"
    assert all(value.is_verified and value.pages == (1,) for value in extraction.values)
