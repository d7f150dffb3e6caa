"""The samples through the real engine and the embedded model: whatever it imagines, each citation is true."""

import asyncio
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from mmserve.config import CacheConfig, EngineConfig
from mmserve.engine.client import EngineClient
from mmserve.engine.prompt_builder import PromptBuilder
from mmserve.pipelines.summarize import SummarizeOptions, summarize
from mmserve.pipelines.summary import Summary
from mmserve.vision.pages import PageLimits, PageReader

# A model works through all samples, however many cores there are for it.
pytestmark = pytest.mark.timeout(900)

SAMPLES = Path(__file__).parents[2] / "samples"
NAMES = sorted(path.name for path in SAMPLES.iterdir() if path.suffix not in (".md", ".json"))


async def _summaries(model: str) -> tuple[dict[str, Summary], dict[str, dict[int, str]]]:
    client = EngineClient.start(EngineConfig(model=model, cache=CacheConfig(memory_bytes=1 << 30)))
    try:
        await asyncio.to_thread(client.wait_until_ready)
        async with PageReader(limits=PageLimits(page_timeout=240)) as reader:
            prompts = PromptBuilder(client.tokenizer)
            options = SummarizeOptions(length="short", max_tokens=120)
            results = await asyncio.gather(
                *(
                    summarize(SAMPLES / name, engine=client, prompts=prompts, reader=reader, options=options)
                    for name in NAMES
                )
            )
            texts = {name: await _texts(reader, SAMPLES / name) for name in NAMES}
    finally:
        await asyncio.to_thread(client.close)
    return dict(zip(NAMES, results, strict=True)), texts


async def _texts(reader: PageReader, path: Path) -> dict[int, str]:
    return {page.number: page.text async for page in reader.pages(await reader.open(path))}


@pytest.fixture(scope="module")
def outcome(smollm2_path: Path) -> tuple[dict[str, Summary], dict[str, dict[int, str]]]:
    return asyncio.run(_summaries(str(smollm2_path)))


def numbers(text: str) -> set[str]:
    """Numbers without separators: 4,111.00 and 4.111 and 4111 are written in many ways."""
    found = re.findall(r"\d+(?:[.,]\d+)*", text)
    return {re.sub(r"[.,]", "", re.sub(r"[.,]0+$|[.,](?=\d{3})", "", number)) for number in found}


def names(sentence: str) -> list[str]:
    """Capitalised words but the first."""
    return re.findall(r"(?<=[\w,;:] )[^\W\d_a-zäöüß][^\W\d_]{2,}", sentence)


def is_on(pages: Iterable[str], sentence: str) -> bool:
    text = " ".join(pages)
    return numbers(sentence) <= numbers(text) and all(name.casefold() in text.casefold() for name in names(sentence))


@pytest.mark.parametrize("name", NAMES)
def test_every_cited_page_has_the_numbers_and_names_of_the_sentence(
    name: str, outcome: tuple[dict[str, Summary], dict[str, dict[int, str]]]
) -> None:
    summary, texts = outcome[0][name], outcome[1][name]
    assert summary.citations
    for citation in summary.citations:
        assert citation.pages
        assert is_on([texts[page] for page in citation.pages], citation.sentence), citation
        assert citation.marked in summary.text


def test_the_blank_page_is_named_and_never_cited(
    outcome: tuple[dict[str, Summary], dict[str, dict[int, str]]],
) -> None:
    report = outcome[0]["annual-report.pdf"]
    assert report.text.endswith("Page 6 is blank.")
    assert all(6 not in citation.pages for citation in report.citations)


def test_results_say_how_they_came_about(outcome: tuple[dict[str, Summary], dict[str, dict[int, str]]]) -> None:
    for summary in outcome[0].values():
        assert summary.usage.completion_tokens > 0
        assert summary.model
        num_extracts = sum(citation.origin == "document" for citation in summary.citations)
        assert bool(num_extracts) == any("word for word" in warning for warning in summary.warnings)
