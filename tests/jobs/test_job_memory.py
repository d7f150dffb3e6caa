"""What is remembered: pages that were read, answers that were given, results."""

import asyncio
import math
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from job_fakes import CountingEngine, CountingReader, Office, document_text, ended, events_of, text_of
from sqlalchemy import delete

from mmserve.errors import DocumentError
from mmserve.jobs.answer_memory import RememberingEngine
from mmserve.jobs.digests import digest_of
from mmserve.jobs.page_memory import RememberingReader
from mmserve.jobs.records import Job
from mmserve.jobs.results import ResultKey
from mmserve.jobs.service import JobService
from mmserve.jobs.tables import page_texts
from mmserve.pipelines.summarize import SummarizeOptions
from mmserve.request import ImageSpan, SamplingParams
from mmserve.vision.page_types import Page, PageOptions

pytest_plugins = ["job_fixtures"]

GREEDY = SamplingParams(temperature=0.0, max_tokens=50)
PROMPT = "What does the treaty of Vienna say?"
ANSWER = "The treaty says a good deal, and repeats it."


# Pages


async def pages_of(reader: RememberingReader, path: Path, selection: list[int] | None = None) -> list[Page]:
    document = await reader.open(path)
    return [page async for page in reader.pages(document, selection)]


def test_pages_are_read_once_and_come_back_as_they_were(office: Office) -> None:
    office.desk.reader.problems = {3: DocumentError("timeout", "page 3 took too long")}

    async def scenario() -> None:
        async with office.service() as service:
            file = await office.add(service, document_text(5).replace("Lisbon", "L\0sb😀n Ä"))
            fresh, again = CountingReader(problems=office.desk.reader.problems), CountingReader()
            first = RememberingReader(fresh, service._database, "anna", 60.0)
            part = await pages_of(first, file.path, [4, 2])
            assert [page.number for page in part] == [4, 2]
            whole = await pages_of(first, file.path)
            assert fresh.read == [4, 2, 1, 3, 5]
            second = RememberingReader(again, service._database, "anna", 60.0)
            repeated = await pages_of(second, file.path)
            # A page that could not be read may be readable now.
            assert again.read == [3]
            assert repeated[:2] + repeated[3:] == whole[:2] + whole[3:]
            assert (repeated[2].problem, whole[2].problem) == (None, office.desk.reader.problems[3])

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("owner", "options"), [("bert", PageOptions()), ("anna", PageOptions(dpi=100)), ("anna", PageOptions(ocr="off"))]
)
def test_pages_are_an_owners_own_and_of_one_way_of_reading(
    sqlite_office: Office, owner: str, options: PageOptions
) -> None:
    async def scenario() -> None:
        async with sqlite_office.service() as service:
            file = await sqlite_office.add(service, document_text(2))
            await sqlite_office.add(service, document_text(2), owner="bert")
            await pages_of(RememberingReader(CountingReader(), service._database, "anna", 60.0), file.path)
            other = CountingReader(options=options)
            await pages_of(RememberingReader(other, service._database, owner, 60.0), file.path)
            assert other.read == [1, 2]

    asyncio.run(scenario())


def test_pages_that_are_forgotten_in_the_middle_are_read(sqlite_office: Office) -> None:
    async def scenario() -> None:
        async with sqlite_office.service() as service:
            file = await sqlite_office.add(service, document_text(70))
            await pages_of(RememberingReader(CountingReader(), service._database, "anna", 60.0), file.path)
            reader = RememberingReader(again := CountingReader(), service._database, "anna", 60.0)
            numbers = []
            async with aclosing(reader.pages(await reader.open(file.path))) as pages:
                async for page in pages:
                    numbers.append(page.number)
                    if page.number == 1:
                        await service._database.write(lambda connection: connection.execute(delete(page_texts)))
            assert numbers == list(range(1, 71))
            assert again.read == [65, 66, 67, 68, 69, 70]

    asyncio.run(scenario())


# Answers


async def a_running_job(office: Office, service: JobService) -> Job:
    file = await office.add(service, document_text(1, title="obstacle"))
    job, _ = await service.jobs.create("anna", "summarize", [file.id], {})
    async for event in service.jobs.events("anna", job.id):
        if event.data.get("event") == "request_submitted":
            break
    return job


class Asking:
    """Requests to a remembering engine of a job."""

    def __init__(self, service: JobService, job: Job) -> None:
        self.inner = CountingEngine(lambda _: ANSWER)
        self.engine = RememberingEngine(self.inner, service._database, job.id, "model")

    async def ask(self, params: SamplingParams = GREEDY, *, num_tokens: float = math.inf, **rest: Any) -> str:
        text, count = "", 0
        async with aclosing(self.engine.generate(self.inner.tokenizer.encode(PROMPT), params, **rest)) as deltas:
            async for delta in deltas:
                text += delta.text
                count += len(delta.token_ids)
                if count >= num_tokens:
                    break
        return text


def with_asking(office: Office, scenario: Callable[[Asking], Any]) -> None:
    async def run() -> None:
        async with office.service() as service:
            await scenario(Asking(service, await a_running_job(office, service)))

    asyncio.run(run())


def test_an_answer_is_asked_for_once(office: Office) -> None:
    async def scenario(asking: Asking) -> None:
        assert [await asking.ask() for _ in range(3)] == [ANSWER] * 3
        assert len(asking.inner.prompts) == 1

    with_asking(office, scenario)


def test_an_answer_that_is_enough_for_its_reader_is_enough_the_next_time(office: Office) -> None:
    async def scenario(asking: Asking) -> None:
        begun = [await asking.ask(num_tokens=5) for _ in range(3)]
        assert begun == ["The treaty says"] * 3
        assert len(asking.inner.prompts) == 1
        # Who wants more gets what follows, and that is remembered in turn.
        assert [await asking.ask() for _ in range(2)] == [ANSWER] * 2
        assert len(asking.inner.prompts) == 2

    with_asking(office, scenario)


def test_an_answer_that_was_cut_by_a_cancellation_is_not_taken_for_enough(office: Office) -> None:
    async def scenario(asking: Asking) -> None:
        async def read_and_wait() -> None:
            async with aclosing(asking.engine.generate(asking.inner.tokenizer.encode(PROMPT), GREEDY)) as deltas:
                async for _ in deltas:
                    has_begun.set()
                    await asyncio.sleep(3600)

        has_begun = asyncio.Event()
        task = asyncio.create_task(read_and_wait())
        await has_begun.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (asking.inner.num_running, asking.inner.num_aborted) == (0, 1)
        assert await asking.ask() == ANSWER
        assert len(asking.inner.prompts) == 2

    with_asking(office, scenario)


@pytest.mark.parametrize(
    "params",
    [
        replace(GREEDY, max_tokens=49),
        replace(GREEDY, stop=("deal",)),
        replace(GREEDY, logit_bias={7: 1.0}),
        replace(GREEDY, temperature=0.5, seed=1),
        replace(GREEDY, repetition_penalty=1.1),
    ],
)
def test_other_parameters_are_another_question(sqlite_office: Office, params: SamplingParams) -> None:
    async def scenario(asking: Asking) -> None:
        await asking.ask()
        for _ in range(2):
            await asking.ask(params)
        assert len(asking.inner.prompts) == 2

    with_asking(sqlite_office, scenario)


def test_other_pictures_are_another_question(sqlite_office: Office) -> None:
    async def scenario(asking: Asking) -> None:
        for content in (b"a", b"b", b"a"):
            await asking.ask(images=[ImageSpan(0, 3, content)])
        assert len(asking.inner.prompts) == 2

    with_asking(sqlite_office, scenario)


def test_what_is_random_is_asked_for_every_time(sqlite_office: Office) -> None:
    async def scenario(asking: Asking) -> None:
        for _ in range(2):
            await asking.ask(replace(GREEDY, temperature=0.5))
        assert len(asking.inner.prompts) == 2

    with_asking(sqlite_office, scenario)


def test_every_parameter_is_part_of_the_question() -> None:
    plain = SamplingParams()
    others: dict[str, Any] = {
        "n": 2, "max_tokens": 5, "min_tokens": 1, "temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.1,
        "presence_penalty": 1.0, "frequency_penalty": 1.0, "repetition_penalty": 1.5, "logit_bias": {1: 1.0}, "seed": 3,
        "logprobs": 1, "stop": ("a",), "stop_token_ids": (1,), "include_stop_str_in_output": True, "ignore_eos": True,
        "skip_special_tokens": False, "detokenize": False,
    }  # fmt: skip
    digests = {digest_of(replace(plain, **{name: value})) for name, value in others.items()}
    assert len(digests | {digest_of(plain)}) == len(others) + 1


# Results and digests


def test_an_equal_question_is_answered_from_the_cache_and_says_so(office: Office) -> None:
    async def scenario() -> None:
        async with office.service() as service:
            one = await office.add(service, document_text(2), name="one.pdf")
            two = await office.add(service, document_text(2), name="two.pdf")
            results = []
            for file, options, no_cache in (
                (one, {}, False),
                (two, {"length": "medium"}, False),
                (two, {}, True),
                (two, {"length": "long"}, False),
            ):
                job, _ = await service.jobs.create("anna", "summarize", [file.id], options, no_cache=no_cache)
                done = await ended(service, job)
                results.append((done.results or [{}])[0])
        assert [result["cached"] for result in results] == [False, True, False, False]
        assert results[1] == {**results[0], "name": "two.pdf", "cached": True}

    asyncio.run(scenario())


def test_a_follower_of_a_cached_result_gets_its_text(office: Office) -> None:
    async def scenario() -> None:
        async with office.service() as service:
            file = await office.add(service, document_text(2))
            for _ in range(2):
                job, _ = await service.jobs.create("anna", "summarize", [file.id], {})
                events = await events_of(service, job)
            assert [event.event for event in events] == ["delta", "result", "done"]
            assert text_of(events) == events[1].data["result"]["text"]
            assert events[1].data["result"]["cached"]

    asyncio.run(scenario())


def test_a_random_answer_is_another_one_each_time(sqlite_office: Office) -> None:
    async def scenario() -> None:
        async with sqlite_office.service() as service:
            file = await sqlite_office.add(service, document_text(1))
            cached = []
            for seed in (None, None, 3, 3):
                options = {"temperature": 1.0, "seed": seed}
                job, _ = await service.jobs.create("anna", "summarize", [file.id], options)
                cached += [result["cached"] for result in (await ended(service, job)).results or ()]
            assert cached == [False, False, False, True]

    asyncio.run(scenario())


def test_results_are_an_owners_own_and_expire(office: Office) -> None:
    key = ResultKey.of("ab" * 32, "summarize", SummarizeOptions(), "model")

    async def scenario() -> None:
        async with office.service(retention_seconds=60.0) as service:
            cache = service.results
            await cache.put("anna", key, {"name": "a.pdf", "text": "old", "pages": [{"problem": None}]})
            await cache.put("anna", key, {"name": "a.pdf", "text": "new \0", "pages": [], "cached": False})
            assert await cache.get("anna", key, name="b.pdf") == {
                "name": "b.pdf",
                "text": "new \0",
                "pages": [],
                "cached": True,
            }
            assert await cache.get("bert", key, name="b.pdf") is None
            office.clock.ahead = 61.0
            assert await cache.get("anna", key, name="b.pdf") is None

    asyncio.run(scenario())


def test_a_result_with_an_unread_page_is_not_kept(office: Office) -> None:
    key = ResultKey.of("ab" * 32, "summarize", SummarizeOptions(), "model")

    async def scenario() -> None:
        async with office.service() as service:
            problem = {"code": "timeout", "message": "too slow"}
            await service.results.put("anna", key, {"name": "a", "pages": [{"problem": None}, {"problem": problem}]})
            assert await service.results.get("anna", key, name="a") is None

    asyncio.run(scenario())


def test_what_decides_a_result_is_in_its_key() -> None:
    options = SummarizeOptions()
    keys = [
        ResultKey.of("ab" * 32, "summarize", options, "model"),
        ResultKey.of("cd" * 32, "summarize", options, "model"),
        ResultKey.of("ab" * 32, "transcribe", options, "model"),
        ResultKey.of("ab" * 32, "summarize", SummarizeOptions(prompt="names"), "model"),
        ResultKey.of("ab" * 32, "summarize", SummarizeOptions(pages="1"), "model"),
        ResultKey.of("ab" * 32, "summarize", options, "another model"),
    ]
    assert len(set(keys)) == len(keys)
    assert keys[0] == ResultKey.of("ab" * 32, "summarize", SummarizeOptions(length="medium"), "model")


@dataclass(frozen=True)
class Point:
    x: Any


class Colour(Enum):
    RED = "red"


def test_digests_tell_values_apart_and_nothing_else() -> None:
    values = [
        None, True, 0, 1.5, "a", b"a", [1, 2], [[1], 2], {"a": 1}, {"a": 2}, {"a": 1, "b": 2}, {"b": 2, "a": 1},
        Point(1), Point([1]), Point(Point(1)), "1", "red2", [], "None",
    ]  # fmt: skip
    assert len({digest_of(value) for value in values}) == len(values)
    assert digest_of((1, 2)) == digest_of([1, 2])
    assert digest_of(Colour.RED) == digest_of("red")
    with pytest.raises(TypeError, match="no digest"):
        digest_of(object())
