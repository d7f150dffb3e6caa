"""Text that is told twice: a follower always ends with the text of the result."""

import pytest
from job_fakes import text_of

from mmserve.jobs.records import JobEvent
from mmserve.jobs.telling import FileTeller, Teller
from mmserve.pipelines.events import TextAdded


def events_in(teller: Teller) -> list[JobEvent]:
    events, _ = teller.take()
    return [JobEvent(number, event, dict(data)) for number, (event, data) in enumerate(events, start=1)]


@pytest.mark.parametrize(
    ("told", "again", "num_restarts"),
    [
        (["One. "], ["One. ", "Two."], 0),
        (["One. ", "Two."], ["One. Two."], 0),
        (["One. Two."], ["One. ", "Two. ", "Three."], 0),
        (["One. Two."], ["One. ", "Too. ", "Three."], 1),
        (["One. Two."], ["One. "], 1),
        (["One."], [], 1),
        ([], ["One."], 0),
        (["One. Two."], ["O", "ne. T", "wx", "y"], 1),
    ],
)
@pytest.mark.parametrize("is_new_process", [True, False])
def test_a_follower_ends_with_the_text_of_the_last_time(
    told: list[str], again: list[str], num_restarts: int, is_new_process: bool
) -> None:
    teller = Teller(["a.pdf"])
    file_teller = FileTeller(teller, 0)
    for text in told:
        file_teller(TextAdded(text))
    before = events_in(teller)
    if is_new_process:
        file_teller = FileTeller(teller, 0)
        file_teller.remember((event.event, event.data) for event in before)
    file_teller.start_again()
    for text in again:
        file_teller(TextAdded(text))
    file_teller.finish()
    events = before + events_in(teller)
    assert text_of(events) == "".join(again)
    assert sum(event.data.get("event") == "restarted" for event in events) == num_restarts


def test_text_that_comes_quickly_is_one_event() -> None:
    teller = Teller(["a.pdf", "b.pdf"])
    tellers = [FileTeller(teller, index) for index in range(2)]
    for index in (0, 0, 1, 0):
        tellers[index](TextAdded("x"))
    assert [(event.data["index"], event.data["text"]) for event in events_in(teller)] == [(0, "xx"), (1, "x"), (0, "x")]
