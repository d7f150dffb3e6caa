"""Jobs from their creation to their end: results, events, cancelling, and what goes wrong."""

import asyncio
import random

import pytest
from job_fakes import CountingEngine, Desk, Office, document_text, ended, events_of, text_of
from sqlalchemy import delete

from mmserve.errors import DocumentError, EngineError, ErrorCode, MMServeError, RequestError
from mmserve.jobs.service import JobService
from mmserve.jobs.tables import jobs

pytest_plugins = ["job_fixtures"]

# About this the engine's answers never end.
SLOW = document_text(1, title="obstacle")


def test_a_job_summarises_its_file_and_tells_how_it_goes(office: Office) -> None:
    async def scenario() -> None:
        async with office.service() as service:
            file = await office.add(service, document_text(5))
            job, is_new = await service.jobs.create("anna", "summarize", [file.id], {"length": "short"})
            assert (is_new, job.status, job.results) == (True, "queued", None)
            events = await events_of(service, job)
            done = await service.jobs.get("anna", job.id)
        assert (done.status, done.error, done.files[0].status) == ("done", None, "done")
        assert (done.files[0].num_pages, done.files[0].num_pages_read) == (5, 5)
        assert done.results is not None
        result = done.results[0]
        assert (result["object"], result["name"], result["cached"]) == ("summary", "treaty.pdf", False)
        assert "Lisbon" in result["text"]
        assert [event.number for event in events] == list(range(1, len(events) + 1))
        assert [event.event for event in events][-2:] == ["result", "done"]
        assert events[-2].data == {"index": 0, "name": "treaty.pdf", "result": result}
        assert events[-1].data == {"status": "done"}
        assert text_of(events) == result["text"]
        pages = [event.data["num_read"] for event in events if event.data.get("event") == "page_read"]
        assert pages == [1, 2, 3, 4, 5]

    asyncio.run(scenario())


def test_events_can_be_had_again_from_any_number(office: Office) -> None:
    async def scenario() -> None:
        async with office.service() as service:
            file = await office.add(service, document_text(3))
            job, _ = await service.jobs.create("anna", "summarize", [file.id], {})
            events = await events_of(service, job)
            for after in range(len(events) + 1):
                assert await events_of(service, job, after) == events[after:]
        async with office.service() as service:
            assert await events_of(service, job) == events

    asyncio.run(scenario())


def test_a_follower_gets_events_while_the_job_runs(office: Office) -> None:
    """The engine hangs in its answer about the second page: what is told before has to come all the same."""
    office.desk.engine.hanging = {"Geneva"}

    async def scenario() -> None:
        async with office.service() as service:
            file = await office.add(service, document_text(3))
            job, _ = await service.jobs.create("anna", "summarize", [file.id], {})
            kinds = []
            async for event in service.jobs.events("anna", job.id):
                kinds.append(event.data.get("event", event.event))
                if kinds[-1] == "request_submitted":
                    await service.jobs.cancel("anna", job.id)
        assert kinds[0] == "document_opened"
        assert kinds[-1] == "done"

    asyncio.run(scenario())


def test_a_file_that_fails_leaves_the_others_alone(office: Office) -> None:
    office.desk.reader.problems = {2: DocumentError("corrupt_document", "page 2 is damaged")}

    async def scenario() -> None:
        async with office.service() as service:
            good = await office.add(service, document_text(1), name="good.pdf")
            bad = await office.add(service, "\f", name="bad.pdf")
            office.desk.reader.problems[1] = DocumentError("corrupt_document", "page 1 is damaged")
            job, _ = await service.jobs.create("anna", "summarize", [bad.id], {})
            failed = await ended(service, job)
            del office.desk.reader.problems[1]
            await service.files.delete("anna", bad.id)
            both, _ = await service.jobs.create("anna", "summarize", [good.id, good.id], {"length": "long"})
            done = await ended(service, both)
        assert (failed.status, failed.files[0].status) == ("failed", "failed")
        assert failed.error == failed.files[0].error
        assert failed.error is not None
        assert (failed.error["code"], failed.error["type"]) == ("corrupt_document", "invalid_request_error")
        assert failed.results == [{"name": "bad.pdf", "error": failed.error}]
        assert (done.status, [file.status for file in done.files]) == ("done", ["done", "done"])

    asyncio.run(scenario())


def test_a_job_is_done_if_one_of_its_files_is(office: Office) -> None:
    async def scenario() -> None:
        async with office.service(max_concurrent_documents=1) as service:
            blocking = await office.add(service, SLOW)
            first, _ = await service.jobs.create("anna", "summarize", [blocking.id], {})
            good = await office.add(service, document_text(1), name="good.pdf")
            gone = await office.add(service, document_text(2), name="gone.pdf")
            job, _ = await service.jobs.create("anna", "summarize", [gone.id, good.id], {})
            await service.files.delete("anna", gone.id)
            await service.jobs.cancel("anna", first.id)
            done = await ended(service, job)
        assert (done.status, [file.status for file in done.files]) == ("done", ["failed", "done"])
        assert done.results is not None
        assert done.results[0]["error"]["code"] == "not_found"
        assert done.results[1]["name"] == "good.pdf"

    asyncio.run(scenario())


def test_an_unexpected_fault_says_nothing_of_the_inside(office: Office, caplog: pytest.LogCaptureFixture) -> None:
    office.desk.engine.failures = [ZeroDivisionError("the secret of page 1")]

    async def scenario() -> None:
        async with office.service() as service:
            file = await office.add(service, document_text(1))
            job, _ = await service.jobs.create("anna", "summarize", [file.id], {})
            failed = await ended(service, job)
        assert failed.error is not None
        assert (failed.status, failed.error["code"]) == ("failed", "internal_error")
        assert "secret" not in failed.error["message"]

    asyncio.run(scenario())
    assert "unexpected error" in caplog.text


def test_cancelling_a_running_job_ends_the_engines_work(office: Office) -> None:
    async def scenario() -> None:
        async with office.service() as service:
            file = await office.add(service, SLOW)
            job, _ = await service.jobs.create("anna", "summarize", [file.id], {})
            async for event in service.jobs.events("anna", job.id):
                if event.data.get("event") == "request_submitted":
                    break
            cancelled = await service.jobs.cancel("anna", job.id)
            assert (office.desk.engine.num_running, office.desk.engine.num_aborted) == (0, 1)
            assert (cancelled.status, cancelled.files[0].status) == ("cancelled", "cancelled")
            assert (await events_of(service, job))[-1].data == {"status": "cancelled"}
            assert (await service.jobs.cancel("anna", job.id)) == cancelled
            await service.jobs.remove("anna", job.id)
            with pytest.raises(RequestError, match="no such job"):
                await service.jobs.get("anna", job.id)

    asyncio.run(scenario())


def test_a_queued_job_that_is_cancelled_never_runs(office: Office) -> None:
    async def scenario() -> None:
        async with office.service(max_concurrent_documents=1) as service:
            slow = await office.add(service, SLOW)
            file = await office.add(service, document_text(1))
            blocking, _ = await service.jobs.create("anna", "summarize", [slow.id], {})
            queued, _ = await service.jobs.create("anna", "summarize", [file.id], {"length": "long"})
            assert (await service.jobs.cancel("anna", queued.id)).status == "cancelled"
            await service.jobs.cancel("anna", blocking.id)
            third, _ = await service.jobs.create("anna", "summarize", [file.id], {"length": "short"})
            assert (await ended(service, third)).status == "done"
            assert (await service.jobs.get("anna", queued.id)).started_at is None

    asyncio.run(scenario())


def test_a_job_that_has_not_ended_cannot_be_removed(office: Office) -> None:
    async def scenario() -> None:
        async with office.service() as service:
            file = await office.add(service, SLOW)
            job, _ = await service.jobs.create("anna", "summarize", [file.id], {})
            with pytest.raises(RequestError, match="cancel it first"):
                await service.jobs.remove("anna", job.id)

    asyncio.run(scenario())


def test_the_queue_is_bounded(office: Office) -> None:
    async def scenario() -> None:
        async with office.service(max_concurrent_documents=1, max_queued_jobs=2) as service:
            file = await office.add(service, SLOW)
            running, _ = await service.jobs.create("anna", "summarize", [file.id], {})
            async for event in service.jobs.events("anna", running.id):
                if event.data.get("event") == "request_submitted":
                    break
            for _ in range(2):
                await service.jobs.create("anna", "summarize", [file.id], {})
            with pytest.raises(EngineError) as refused:
                await service.jobs.create("anna", "summarize", [file.id], {})
        assert (refused.value.code, refused.value.http_status) == ("queue_full", 429)

    asyncio.run(scenario())


def test_one_owner_of_several_has_half_of_the_queue(office: Office) -> None:
    async def scenario() -> None:
        async with office.service(max_concurrent_documents=1, max_queued_jobs=4, has_owners=True) as service:
            office.desk.is_ready = False
            file, of_another = await office.add(service, SLOW), await office.add(service, SLOW, owner="ben")
            for _ in range(2):
                await service.jobs.create("anna", "summarize", [file.id], {})
            with pytest.raises(EngineError, match="2 of your jobs") as refused:
                await service.jobs.create("anna", "summarize", [file.id], {})
            assert refused.value.code == "queue_full"
            await service.jobs.create("ben", "summarize", [of_another.id], {})

    asyncio.run(scenario())


def test_who_follows_a_job_that_is_removed_hears_of_it(office: Office) -> None:
    async def scenario() -> None:
        async with office.service() as service:
            file = await office.add(service, SLOW)
            job, _ = await service.jobs.create("anna", "summarize", [file.id], {})
            elsewhere = office.database()

            async def follow() -> None:
                async for event in service.jobs.events("anna", job.id):
                    if event.data.get("event") == "request_submitted":
                        await elsewhere.write(lambda connection: connection.execute(delete(jobs)))

            with pytest.raises(RequestError) as gone:
                await follow()
            await elsewhere.close()
        assert gone.value.code == "not_found"

    asyncio.run(scenario())


def test_an_idempotency_key_makes_one_job_of_many_requests(office: Office) -> None:
    async def scenario() -> None:
        async with office.service() as service:
            file = await office.add(service, document_text(1))

            async def create(digest: str = "abc") -> tuple[str, bool]:
                job, is_new = await service.jobs.create(
                    "anna", "summarize", [file.id], {}, idempotency_key="k" * 300, request_digest=digest
                )
                return job.id, is_new

            created = await asyncio.gather(*(create() for _ in range(8)))
            assert len({job_id for job_id, _ in created}) == 1
            assert sum(is_new for _, is_new in created) == 1
            with pytest.raises(RequestError) as conflict:
                await create("other")
            assert (conflict.value.code, conflict.value.http_status) == ("idempotency_conflict", 409)
            theirs = await office.add(service, document_text(1), owner="bert")
            job, is_new = await service.jobs.create(
                "bert", "summarize", [theirs.id], {}, idempotency_key="k" * 300, request_digest="abc"
            )
            assert is_new
            assert job.id != created[0][0]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("task", "options", "code", "param"),
    [
        ("translate", {}, "invalid_request", "task"),
        ("summarize", {"length": "endless"}, "invalid_request", "length"),
        ("summarize", {"colour": "red"}, "invalid_request", "colour"),
    ],
)
def test_what_cannot_be_done_is_refused_at_once(
    sqlite_office: Office, task: str, options: dict[str, str], code: ErrorCode, param: str
) -> None:
    async def scenario() -> None:
        async with sqlite_office.service() as service:
            file = await sqlite_office.add(service, document_text(1))
            with pytest.raises(RequestError) as refused:
                await service.jobs.create("anna", task, [file.id], options)  # type: ignore[arg-type]
        assert (refused.value.code, refused.value.param) == (code, param)

    asyncio.run(scenario())


def test_another_owners_files_and_jobs_are_not_there(office: Office) -> None:
    async def scenario() -> None:
        async with office.service() as service:
            file = await office.add(service, document_text(1))
            job, _ = await service.jobs.create("anna", "summarize", [file.id], {})
            attempts = [
                service.jobs.get("bert", job.id),
                service.jobs.cancel("bert", job.id),
                service.jobs.remove("bert", job.id),
                service.jobs.create("bert", "summarize", [file.id], {}),
                anext(service.jobs.events("bert", job.id)),
                service.jobs.get("anna", "job-\0"),
            ]
            for attempt in attempts:
                with pytest.raises(RequestError) as refused:
                    await attempt
                assert refused.value.code == "not_found"
            assert (await service.jobs.list("bert")) == ([], False)

    asyncio.run(scenario())


def test_jobs_are_listed_page_by_page_and_by_status(office: Office) -> None:
    async def scenario() -> None:
        async with office.service() as service:
            file = await office.add(service, document_text(1))
            made = []
            for _ in range(5):
                job, _ = await service.jobs.create("anna", "summarize", [file.id], {})
                made.append((await ended(service, job)).id)
                await asyncio.sleep(0.002)
            first, has_more = await service.jobs.list("anna", limit=3)
            assert ([job.id for job in first], has_more) == (made[:1:-1], True)
            rest, has_more = await service.jobs.list("anna", limit=3, after=first[-1].id)
            assert ([job.id for job in rest], has_more) == (made[1::-1], False)
            assert rest[0].results is None
            assert rest[0].files[0].filename == "treaty.pdf"
            assert await service.jobs.list("anna", status="failed") == ([], False)
            with pytest.raises(RequestError, match="after must be"):
                await service.jobs.list("anna", after="job-1; --")

    asyncio.run(scenario())


def test_the_engine_may_go_away_and_come_back(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmserve.jobs.job_run._RETRY_SECONDS", (0.01, 0.01))
    office.desk.engine.failures = [EngineError("engine_dead", "gone"), EngineError("engine_not_ready", "loading")]

    async def scenario() -> None:
        async with office.service() as service:
            file = await office.add(service, document_text(3))
            job, _ = await service.jobs.create("anna", "summarize", [file.id], {})
            events = await events_of(service, job)
            done = await service.jobs.get("anna", job.id)
        assert done.status == "done"
        assert done.results is not None
        assert text_of(events) == done.results[0]["text"]
        assert office.desk.reader.read == [1, 2, 3]

    asyncio.run(scenario())


def test_an_engine_that_stays_away_fails_the_file(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmserve.jobs.job_run._RETRY_SECONDS", (0.01, 0.01))
    office.desk.engine.failures = [EngineError("engine_dead", "gone") for _ in range(20)]

    async def scenario() -> None:
        async with office.service() as service:
            file = await office.add(service, document_text(1))
            job, _ = await service.jobs.create("anna", "summarize", [file.id], {})
            failed = await ended(service, job)
        assert failed.error is not None
        assert (failed.status, failed.error["code"]) == ("failed", "engine_dead")

    asyncio.run(scenario())


def test_counters_say_what_was_done(office: Office) -> None:
    async def scenario() -> None:
        async with office.service() as service:
            file = await office.add(service, document_text(2))
            for _ in range(2):
                job, _ = await service.jobs.create("anna", "summarize", [file.id], {})
                await ended(service, job)
            slow = await office.add(service, SLOW)
            job, _ = await service.jobs.create("anna", "summarize", [slow.id], {})
            await service.jobs.cancel("anna", job.id)
            counters = service.counters
        assert counters.jobs == {("summarize", "done"): 2, ("summarize", "cancelled"): 1}
        assert counters.num_running == 0

    asyncio.run(scenario())


def test_an_owner_with_many_jobs_does_not_keep_others_waiting(office: Office) -> None:
    async def scenario() -> None:
        async with office.service(max_concurrent_documents=2) as service:
            file = await office.add(service, SLOW)
            running = [(await service.jobs.create("anna", "summarize", [file.id], {}))[0] for _ in range(4)]
            theirs = await office.add(service, document_text(1), owner="bert")
            job, _ = await service.jobs.create("bert", "summarize", [theirs.id], {})
            await service.jobs.cancel("anna", running[0].id)
            assert (await ended(service, job)).status == "done"
            assert (await service.jobs.get("anna", running[3].id)).status == "queued"

    asyncio.run(scenario())


def test_jobs_that_are_cancelled_at_random_leave_nothing_behind(office: Office) -> None:
    chance = random.Random(7)
    office.desk.engine.delay = 0.0005

    async def cancel_later(service: JobService, job_id: str) -> None:
        await asyncio.sleep(chance.random() * 0.3)
        await service.jobs.cancel("anna", job_id)

    async def scenario() -> None:
        async with office.service(max_concurrent_documents=3) as service:
            texts = [document_text(2, title=f"pact{number}") for number in range(4)]
            file_ids = [(await office.add(service, text)).id for text in texts]
            cancelling = []
            made = []
            for number in range(24):
                chosen = chance.sample(file_ids, chance.randint(1, 3))
                job, _ = await service.jobs.create("anna", "summarize", chosen, {"seed": number}, no_cache=True)
                made.append(job)
                if chance.random() < 0.6:
                    cancelling.append(asyncio.create_task(cancel_later(service, job.id)))
            await asyncio.gather(*cancelling)
            jobs = [await ended(service, job) for job in made]
            engine = office.desk.engine
            assert engine.num_running == 0
            assert {job.status for job in jobs} == {"done", "cancelled"}
            for job in jobs:
                events = await events_of(service, job)
                assert [event.number for event in events] == list(range(1, len(events) + 1))
                assert [event.event for event in events].count("done") == 1
                assert events[-1].data == {"status": job.status}
                if job.status == "done":
                    assert job.results is not None
                    assert [text_of(events, i) for i in range(len(job.files))] == [r["text"] for r in job.results]
            assert service.counters.num_running == 0

    asyncio.run(scenario())


def test_each_owners_work_goes_to_the_owners_engine(sqlite_office: Office) -> None:
    desk = Desk(engines={"bert": CountingEngine()})

    async def scenario() -> None:
        async with sqlite_office.service(desk) as service:
            for owner in ("anna", "bert"):
                file = await sqlite_office.add(service, document_text(1), owner=owner)
                job, _ = await service.jobs.create(owner, "summarize", [file.id], {})
                assert (await ended(service, job)).status == "done"
        assert len(desk.engine.prompts) == len(desk.engines["bert"].prompts) > 0

    asyncio.run(scenario())


def test_errors_of_jobs_have_the_form_of_all_errors() -> None:
    error = MMServeError("timeout", "too late", param="pages")
    assert error.to_dict() == {"message": "too late", "type": "server_error", "param": "pages", "code": "timeout"}


def test_no_job_begins_before_the_model_is_there(sqlite_office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmserve.jobs.runner._POLL_SECONDS", 0.01)
    desk = Desk(is_ready=False)

    async def scenario() -> None:
        async with sqlite_office.service(desk) as service:
            file = await sqlite_office.add(service, document_text(1))
            job, _ = await service.jobs.create("anna", "summarize", [file.id], {})
            await asyncio.sleep(0.1)
            assert (await service.jobs.get("anna", job.id)).status == "queued"
            desk.is_ready = True
            assert (await ended(service, job)).status == "done"

    asyncio.run(scenario())
