"""Summaries by a model that sees the pages: what it is sent, how much of it, and what is cited."""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pipeline_fakes import GivenPages, answering, summary_of
from text_fakes import ScriptedTextEngine
from vision_fakes import SeeingPrompts

from mmserve.errors import RequestError
from mmserve.pipelines.events import Event, RequestSubmitted
from mmserve.pipelines.summarize import SummarizeOptions, summarize
from mmserve.pipelines.summary import Summary
from mmserve.vision.image_source import PixelLimits
from mmserve.vision.page_types import Document, Page

RENT = "The rent of the workshop is £1,875 a month. It is paid by Hamza Qureshi."
KILNS = "Three electric kilns with 54 kilowatts may be connected in the workshop."
SCAN = Page(2, "Three electric kilns with 54 kilowatts may be connected.", "ocr")
UNREAD = Page(1, source="none")


def seen(
    pages: list[str | Page],
    engine: ScriptedTextEngine,
    prompts: SeeingPrompts | None = None,
    on_event: Callable[[Event], None] | None = None,
    reader: GivenPages | None = None,
    **options: Any,
) -> Summary:
    return asyncio.run(
        summarize(
            Path("scan.pdf"),
            engine=engine,
            reader=reader or GivenPages(pages),
            options=SummarizeOptions(**options),
            prompts=prompts or SeeingPrompts(engine.tokenizer),
            on_event=on_event,
        )
    )


def pictures(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"<picture-(\d+)>", text)]


def test_auto_sends_pictures_and_the_text_layer_but_not_what_ocr_guessed() -> None:
    engine = answering("The rent is £1,875 a month. Up to three kilns with 54 kilowatts may be connected.")
    summary = seen([RENT, SCAN], engine)
    (prompt,) = engine.prompts
    assert pictures(prompt) == [1, 2]
    assert prompt.index("[page 1 ") < prompt.index("<picture-1>") < prompt.index("paid by Hamza")
    assert prompt.index("paid by Hamza") < prompt.index("[page 2 ") < prompt.index("<picture-2>")
    assert "Three electric kilns" not in prompt
    assert [citation.pages for citation in summary.citations][:2] == [(1,), (2,)]


def test_vision_sends_pictures_alone_and_still_checks_against_the_text() -> None:
    engine = answering("The rent is £1,875 a month. The rent is paid by Martha Qureshi.")
    summary = seen([RENT], engine, mode="vision")
    assert pictures(engine.prompts[0]) == [1]
    assert "Hamza" not in engine.prompts[0]
    assert "The rent is £1,875 a month. [p. 1]" in summary.text
    assert "Martha" not in summary.text
    assert summary.num_dropped == 1


def test_text_sends_no_picture() -> None:
    engine = answering("The rent is £1,875 a month.")
    prompts = SeeingPrompts(engine.tokenizer)
    seen([RENT], engine, prompts, mode="text")
    assert pictures(engine.prompts[0]) == []
    assert "Hamza" in engine.prompts[0]
    assert isinstance(prompts.messages[0][-1]["content"], str)


def test_a_text_file_has_no_pictures() -> None:
    class TextFile(GivenPages):
        async def open(self, path: Path, *, name: str | None = None) -> Document:
            return Document(path, "notes.txt", "text/plain", "ab" * 32, 1)

    engine = answering("The rent is £1,875 a month.")
    seen([], engine, reader=TextFile([RENT]))
    assert pictures(engine.prompts[0]) == []


def test_a_text_model_refuses_mode_vision_and_takes_text_in_auto() -> None:
    engine = answering("The rent is £1,875 a month.")
    assert "[p. 1]" in summary_of([RENT], engine, mode="auto").text
    with pytest.raises(RequestError, match="reads text only") as caught:
        summary_of([RENT], engine, mode="vision")
    assert caught.value.code == "images_not_supported"
    with pytest.raises(RequestError, match="mode"):
        SummarizeOptions(mode="blind")  # type: ignore[arg-type]


def test_a_long_document_is_split_by_the_tokens_of_its_pictures() -> None:
    pages: list[str | Page] = [Page(n, f"Meeting {n} was in town {n * 7}.", "ocr") for n in range(1, 31)]

    def answer(prompt: str) -> str:
        return " ".join(f"Meeting {n} was in town {n * 7}." for n in pictures(prompt)[:2] or [1])

    engine = ScriptedTextEngine(answer, max_model_len=1500)
    events: list[Event] = []
    prompts = SeeingPrompts(engine.tokenizer)
    summary = seen(pages, engine, prompts, events.append)
    parts = [event for event in events if isinstance(event, RequestSubmitted) and event.stage == "part"]
    assert len(parts) >= 3
    assert [page for prompt in engine.prompts for page in sorted(pictures(prompt))] == list(range(1, 31))
    sizes = [len(engine.tokenizer.encode(prompt)) for prompt in engine.prompts]
    assert max(size + (p.max_tokens or 0) for size, p in zip(sizes, engine.params, strict=True)) <= 1500
    assert summary.citations
    for citation in summary.citations:
        assert f"Meeting {citation.pages[0]} was" in citation.sentence
    assert prompts.num_held == 0


def test_a_page_that_is_larger_than_a_request_is_made_smaller() -> None:
    engine = answering("The rent is £1,875 a month.", max_model_len=1000)
    prompts = SeeingPrompts(engine.tokenizer, pixels_per_token=AUTO_PER_4000)
    seen([RENT], engine, prompts, mode="vision")
    (image,) = [part for part in prompts.messages[0][-1]["content"] if part["type"] == "image"]
    tokens = asyncio.run(prompts.num_image_tokens(image["source"], image["limits"]))
    assert 300 < tokens < 1000


AUTO_PER_4000 = 1540 * 1540 // 4000


def test_a_page_that_no_budget_makes_small_enough_is_refused_with_advice() -> None:
    class Huge(SeeingPrompts):
        async def num_image_tokens(self, *_: Any) -> int:
            return 5000

    engine = answering("Nothing.", max_model_len=1000)
    with pytest.raises(RequestError, match="--max-model-len") as caught:
        seen([RENT], engine, Huge(engine.tokenizer))
    assert caught.value.code == "context_length_exceeded"


def test_the_operators_budget_is_kept() -> None:
    engine = answering("The rent is £1,875 a month.")
    prompts = SeeingPrompts(engine.tokenizer, limits=PixelLimits(1000, 50_000))
    seen([RENT], engine, prompts)
    (image,) = [part for part in prompts.messages[0][-1]["content"] if part["type"] == "image"]
    assert image["limits"] == PixelLimits(1000, 50_000)


def test_a_text_layer_too_long_for_the_picture_s_request_is_left_out() -> None:
    long = RENT + " Nothing else was decided there." * 200
    engine = answering("The rent is £1,875 a month.", max_model_len=1000)
    seen([long], engine)
    assert pictures(engine.prompts[0]) == [1]
    assert "Hamza" not in engine.prompts[0]


def test_what_was_read_on_a_page_without_text_is_cited_from_that_page_and_said_to_be_unchecked() -> None:
    def answer(prompt: str) -> str:
        if pictures(prompt) == [1]:
            return "The tenant of the workshop is Hamza Qureshi. The deposit of £3,750 is due in May."
        if pictures(prompt) == [2]:
            return "Three electric kilns with 54 kilowatts may be connected in the workshop."
        return "The deposit of £3,750 is due in May. Three electric kilns may be connected. The moon is 7 km away."

    engine = ScriptedTextEngine(answer)
    summary = seen([UNREAD, KILNS], engine)
    assert [pictures(prompt) for prompt in engine.prompts[:2]] == [[1], [2]]
    assert "The deposit of £3,750 is due in May. [p. 1]" in summary.text
    assert "may be connected. [p. 2]" in summary.text
    assert "moon" not in summary.text
    assert any("Page 1 was read from its picture alone" in warning for warning in summary.warnings)
    assert not any(c.origin == "document" and c.pages == (1,) for c in summary.citations)


def test_a_document_of_pictures_alone_needs_no_text_at_all() -> None:
    engine = answering("The tenant of the workshop is Hamza Qureshi. The deposit of £3,750 is due in May.")
    summary = seen([UNREAD], engine, mode="vision")
    assert "The deposit of £3,750 is due in May. [p. 1]" in summary.text
    assert "has no text" not in summary.text


def test_a_page_on_which_the_model_reads_nothing_makes_up_nothing() -> None:
    summary = seen([UNREAD], answering("Here is a summary:"), mode="vision")
    assert summary.citations == ()


def test_blank_pages_are_not_sent() -> None:
    engine = answering("The rent is £1,875 a month.")
    summary = seen(["", RENT], engine)
    assert pictures(engine.prompts[0]) == [2]
    assert "Page 1 is blank." in summary.text


def test_pictures_are_let_go_when_the_answer_fails() -> None:
    engine = answering("x", failure=RuntimeError("no"))
    prompts = SeeingPrompts(engine.tokenizer)
    with pytest.raises(RuntimeError):
        seen([RENT], engine, prompts)
    assert prompts.num_held == 0


def test_a_page_that_cannot_be_drawn_is_read_by_its_text() -> None:
    engine = answering("The rent is £1,875 a month. Up to three kilns with 54 kilowatts may be connected.")
    prompts = SeeingPrompts(engine.tokenizer, is_damaged=lambda page: page == 2)
    summary = seen([RENT, KILNS], engine, prompts, mode="vision")
    assert pictures(engine.prompts[-1]) == []
    assert "Hamza" in engine.prompts[-1]
    assert "may be connected. [p. 2]" in summary.text
    assert any("cannot be drawn" in warning for warning in summary.warnings)
