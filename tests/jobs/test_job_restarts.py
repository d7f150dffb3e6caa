"""Jobs outlive the server: what was read and answered before it ended is not read and asked again."""

import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from job_fakes import CountingEngine, CountingReader, Desk, Office, document_text, ended, events_of, text_of, until

from mmserve.jobs.records import JobEvent
from mmserve.jobs.service import JobService

pytest_plugins = ["job_fixtures"]

NUM_PAGES = 12


async def undisturbed(office: Office) -> tuple[str, int]:
    """The text of the job's result where nothing comes between, and the number of requests."""
    desk = Desk()
    other = Office(office.folder / "other", f"sqlite:///{office.folder}/other/data/jobs.db")
    other.folder.mkdir()
    async with other.service(desk) as service:
        file = await other.add(service, document_text(NUM_PAGES))
        job, _ = await service.jobs.create("anna", "summarize", [file.id], {"length": "long"})
        done = await ended(service, job)
    assert done.results is not None
    return done.results[0]["text"], len(desk.engine.prompts)


def pages_told(events: Sequence[JobEvent]) -> list[int]:
    return [event.data["page"]["number"] for event in events if event.data.get("event") == "page_read"]


def test_a_server_that_stops_in_the_middle_leaves_the_rest_to_the_next(office: Office) -> None:
    first, second = Desk(CountingReader(delay=0.1)), Desk()

    async def scenario() -> None:
        text, num_requests = await undisturbed(office)
        async with office.service(first) as service:
            file = await office.add(service, document_text(NUM_PAGES))
            job, _ = await service.jobs.create("anna", "summarize", [file.id], {"length": "long"})
            before = []
            async for event in service.jobs.events("anna", job.id):
                before.append(event)
                if event.data.get("event") == "request_finished":
                    break
        assert (first.engine.num_running, second.reader.read) == (0, [])
        async with office.service(second) as service:
            events = await events_of(service, job)
            done = await service.jobs.get("anna", job.id)
        assert (done.status, done.results[0]["text"] if done.results else None) == ("done", text)
        assert first.reader.read + second.reader.read == list(range(1, NUM_PAGES + 1))
        assert 0 < len(second.reader.read) < NUM_PAGES
        assert events[: len(before)] == before
        assert [event.number for event in events] == list(range(1, len(events) + 1))
        assert pages_told(events) == list(range(1, NUM_PAGES + 1))
        assert text_of(events) == text
        assert len(second.engine.prompts) < num_requests

    asyncio.run(scenario())


def test_a_server_that_is_killed_leaves_the_rest_to_the_next(office: Office) -> None:
    script = Path(__file__).with_name("crash_script.py")
    command = [sys.executable, str(script), str(office.folder), office.url]
    lines: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.strip())
            if line == "page 8\n":
                process.kill()
                break
        lines += [line.strip() for line in process.stdout]
    job_id = lines[0].removeprefix("job ")
    num_read = sum(line.startswith("page") for line in lines)
    assert "request" in lines

    async def scenario() -> None:
        text, num_requests = await undisturbed(office)
        async with office.service() as service:
            job = await service.jobs.get("anna", job_id)
            events = await events_of(service, job)
            done = await service.jobs.get("anna", job_id)
        assert (done.status, done.results[0]["text"] if done.results else None) == ("done", text)
        # The page that was being written when the process was killed may be read twice.
        assert NUM_PAGES - num_read <= len(office.desk.reader.read) <= NUM_PAGES - num_read + 1
        assert pages_told(events) == list(range(1, NUM_PAGES + 1))
        assert text_of(events) == text
        assert len(office.desk.engine.prompts) < num_requests

    asyncio.run(scenario())


def test_files_that_were_done_before_a_restart_stay_done(office: Office) -> None:
    second = Desk()

    async def scenario() -> None:
        async with office.service(max_concurrent_documents=1) as service:
            good = await office.add(service, document_text(2), name="good.pdf")
            slow = await office.add(service, document_text(1, title="obstacle"), name="slow.pdf")
            job, _ = await service.jobs.create("anna", "summarize", [good.id, slow.id], {})
            async for event in service.jobs.events("anna", job.id):
                if event.event == "result":
                    break
        second.engine.hanging = set()
        async with office.service(second) as service:
            done = await ended(service, job)
        assert [file.status for file in done.files] == ["done", "done"]
        assert office.desk.reader.read + second.reader.read == [1, 2, 1]

    asyncio.run(scenario())


def test_text_that_comes_out_otherwise_the_second_time_begins_anew(office: Office) -> None:
    """Without a seed, an answer at a temperature is another one each time."""
    first = Desk()
    second = Desk(engine=CountingEngine(lambda _: "The treaty was signed in 1802. The treaty was signed in Geneva."))
    first.engine.answer = lambda _: "The treaty was signed in Geneva in 1802. " + "All parties signed. " * 3
    first.engine.delay = 0.02

    async def scenario() -> None:
        options = {"temperature": 1.0}
        async with office.service(first) as service:
            file = await office.add(service, document_text(2).split("\f")[1])
            job, _ = await service.jobs.create("anna", "summarize", [file.id], options)
            async for event in service.jobs.events("anna", job.id):
                if event.event == "delta":
                    break
        async with office.service(second) as service:
            events = await events_of(service, job)
            done = await service.jobs.get("anna", job.id)
        assert done.results is not None
        assert "restarted" in [event.data.get("event") for event in events]
        assert text_of(events) == done.results[0]["text"]
        assert second.engine.prompts

    asyncio.run(scenario())


def test_two_servers_share_the_work_and_do_nothing_twice(office: Office) -> None:
    desks = [Desk(CountingReader(delay=0.001), CountingEngine(delay=0.0002)) for _ in range(2)]
    num_jobs = 16

    async def create(services: Sequence[JobService], number: int) -> str:
        service = services[number % 2]
        file = await office.add(service, document_text(1, title=f"pact{number}"))
        job, _ = await service.jobs.create("anna", "summarize", [file.id], {})
        return job.id

    async def scenario() -> None:
        one, two = (office.service(desk, max_concurrent_documents=2) for desk in desks)
        async with one, two:
            job_ids = [await create((one, two), number) for number in range(num_jobs)]
            jobs = [await ended(two, await two.jobs.get("anna", job_id)) for job_id in job_ids]
        assert {job.status for job in jobs} == {"done"}
        prompts = Counter(prompt for desk in desks for prompt in desk.engine.prompts)
        assert set(prompts.values()) == {1}
        assert len(prompts) == num_jobs
        assert all(desk.reader.read for desk in desks)

    asyncio.run(scenario())


def test_a_job_of_a_server_that_stopped_answering_is_taken_over(office: Office) -> None:
    """The first server is still there, but its claims are not renewed: it has to notice and to let go."""
    first = Desk()

    async def scenario() -> None:
        async with office.service(first, lease_seconds=3600.0) as one:
            file = await office.add(one, document_text(1, title="obstacle"))
            job, _ = await one.jobs.create("anna", "summarize", [file.id], {})
            async for event in one.jobs.events("anna", job.id):
                if event.data.get("event") == "request_submitted":
                    break
            office.clock.ahead = 3601.0
            second = Desk()
            second.engine.hanging = set()
            async with office.service(second) as two:
                done = await ended(two, job)
            assert done.status == "done"
            assert second.engine.prompts == first.engine.prompts
            assert await one.jobs.get("anna", job.id) == done

    asyncio.run(scenario())


def test_a_job_that_is_cancelled_elsewhere_stops_here(office: Office) -> None:
    engine = office.desk.engine

    async def scenario() -> None:
        async with office.service(lease_seconds=0.3) as one:
            file = await office.add(one, document_text(1, title="obstacle"))
            job, _ = await one.jobs.create("anna", "summarize", [file.id], {})
            await until(lambda: engine.num_running == 1)
            async with office.service(Desk()) as two:
                await two.jobs.cancel("anna", job.id)
            await until(lambda: one.counters.num_running == 0)
            assert (engine.num_running, engine.num_aborted) == (0, 1)

    asyncio.run(scenario())


def test_a_job_with_which_the_server_ended_too_often_is_given_up(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmserve.jobs.queue._MAX_STARTS", 2)

    async def scenario() -> None:
        # A server that is killed has no time to put its jobs back.
        with monkeypatch.context() as without_time:
            without_time.setattr("mmserve.jobs.queue.JobQueue.release", _do_nothing)
            async with office.service() as service:
                file = await office.add(service, document_text(1, title="obstacle"))
                job, _ = await service.jobs.create("anna", "summarize", [file.id], {})
                await until(lambda: len(office.desk.engine.prompts) == 1)
            office.clock.ahead += 3600.0
            async with office.service():
                await until(lambda: len(office.desk.engine.prompts) == 2)
        office.clock.ahead += 3600.0
        async with office.service() as service:
            given_up = await ended(service, job)
        assert given_up.error is not None
        assert (given_up.status, given_up.error["code"]) == ("failed", "internal_error")
        assert given_up.results == [{"name": "treaty.pdf", "error": given_up.error}]
        assert len(office.desk.engine.prompts) == 2

    asyncio.run(scenario())


async def _do_nothing(*_: object) -> None:
    return None
