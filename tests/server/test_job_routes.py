"""`/v1/jobs`: what starts, follows, cancels and outlives; with the real runner, only the engine is scripted."""

import functools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from document_server import (
    DAMAGED,
    TEXT,
    OwnerByHeader,
    error_code,
    events_of,
    numbered_events_of,
    scripted,
)
from live_server import LiveServer, serving, wait_until

from mmserve.vision.pages import PageReader

pytest_plugins = ["document_fixtures"]

JOBS = "/v1/jobs"
SUMMARIZE = {"task": "summarize"}


@pytest.fixture(scope="module")
def server(reader: PageReader, places: tuple[Path, Path]) -> Iterator[LiveServer]:
    data_dir, upload_dir = places
    with serving(
        scripted(), reader=reader, data_dir=data_dir, upload_dir=upload_dir, max_files=4, middleware=OwnerByHeader
    ) as live:
        yield live


def stored(api: httpx.Client, content: bytes = TEXT, name: str = "a.txt", **headers: str) -> str:
    file_id: str = api.post("/v1/files", files={"file": (name, content)}, headers=headers).json()["id"]
    return file_id


def started(api: httpx.Client, *file_ids: str, headers: dict[str, str] | None = None, **order: Any) -> dict[str, Any]:
    response = api.post(JOBS, json={**SUMMARIZE, "file_ids": file_ids, **order}, headers=headers)
    assert response.status_code == 202, response.text
    job: dict[str, Any] = response.json()
    return job


def ended(api: httpx.Client, job_id: str, **headers: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = []

    def has_ended() -> bool:
        found[:] = [api.get(f"{JOBS}/{job_id}", headers=headers).json()]
        return found[0]["status"] not in ("queued", "running")

    wait_until(has_ended, seconds=60)
    return found[0]


def test_a_job_over_stored_files_ends_with_a_result_for_each(api: httpx.Client) -> None:
    job = started(api, stored(api), stored(api, TEXT + b"Two.", "b.txt"), options={"length": "short"})
    assert (job["object"], job["task"], job["options"]) == ("job", "summarize", {"length": "short"})
    assert (job["results"], job["error"]) == (None, None)
    assert [file["filename"] for file in job["files"]] == ["a.txt", "b.txt"]
    job = ended(api, job["id"])
    assert job["status"] == "done"
    assert [(file["status"], file["num_pages_read"]) for file in job["files"]] == [("done", 1)] * 2
    assert [result["object"] for result in job["results"]] == ["summary"] * 2
    assert api.get(f"{JOBS}/{job['id']}").json() == job
    assert job["expires_at"] - job["finished_at"] in (7 * 24 * 3600, 7 * 24 * 3600 + 1)


def test_a_job_over_uploads_takes_the_options_as_fields_and_tells_of_files_that_cannot_be_read(
    api: httpx.Client,
) -> None:
    files = [("file", ("good.txt", TEXT)), ("file", ("bad.pdf", DAMAGED))]
    form = {"task": "ask", "question": "What is the total?", "max_tokens": "50", "webhook_url": "", "pages": ""}
    response = api.post(JOBS, files=files, data=form)
    assert response.status_code == 202, response.text
    job = ended(api, response.json()["id"])
    assert (job["status"], job["options"]) == ("done", {"question": "What is the total?", "max_tokens": 50})
    good, bad = job["results"]
    assert (good["object"], good["name"]) == ("answer", "good.txt")
    assert bad["error"]["code"] == "corrupt_document"
    assert [file["status"] for file in job["files"]] == ["done", "failed"]
    assert api.get(f"/v1/files/{job['files'][0]['file_id']}").status_code == 200


def test_a_job_of_which_nothing_could_be_done_has_failed(api: httpx.Client) -> None:
    response = api.post(JOBS, files={"file": ("bad.pdf", DAMAGED)}, data=SUMMARIZE)
    job = ended(api, response.json()["id"])
    assert (job["status"], job["error"]["code"]) == ("failed", "corrupt_document")


def test_jobs_and_routes_share_their_answers(api: httpx.Client) -> None:
    content = TEXT + b"Shared."
    job = ended(api, started(api, stored(api, content))["id"])
    assert job["results"][0]["cached"] is False
    assert api.post("/v1/summarize", files={"file": content}).json()["cached"] is True
    assert ended(api, started(api, stored(api, content))["id"])["results"][0]["cached"] is True
    again = started(api, stored(api, content), options={"no_cache": True})
    assert ended(api, again["id"])["results"][0]["cached"] is False


@pytest.mark.parametrize(
    ("order", "status", "param"),
    [
        ({}, 400, "file_ids"),
        ({"file_ids": []}, 400, "file_ids"),
        ({"file_ids": ["x"] * 5}, 400, "file_ids"),
        ({"file_ids": ["file-1"]}, 404, None),
        ({"file_ids": ["file-1"], "task": "translate"}, 400, "task"),
        ({"file_ids": ["file-1"], "options": {"colour": "red"}}, 400, "colour"),
        ({"file_ids": ["file-1"], "options": {"length": "huge"}}, 400, "length"),
        ({"file_ids": ["file-1"], "options": {"stream": True}}, 400, "stream"),
        ({"file_ids": ["file-1"], "options": {"model": "gpt-9"}}, 404, "model"),
        ({"file_ids": ["file-1"], "task": "ask"}, 400, "question"),
        ({"file_ids": ["file-1"], "colour": "red"}, 400, "colour"),
    ],
)
def test_an_order_that_cannot_be_is_refused(
    api: httpx.Client, order: dict[str, Any], status: int, param: str | None
) -> None:
    response = api.post(JOBS, json={**SUMMARIZE, **order})
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


def test_uploads_of_an_order_that_is_refused_are_not_kept(api: httpx.Client, places: tuple[Path, Path]) -> None:
    mine = {"x-owner": "refused"}
    post = functools.partial(api.post, JOBS, files={"file": TEXT}, headers=mine)
    assert error_code(post(data={"task": "ask"})) == (400, "invalid_request")
    assert error_code(post(data={})) == (400, "invalid_request")
    assert error_code(post(data={**SUMMARIZE, "webhook_url": "https://example.org/x"})) == (400, "url_not_allowed")
    assert api.get("/v1/files", headers=mine).json()["data"] == []
    assert api.get(JOBS, headers=mine).json()["data"] == []
    wait_until(lambda: not list(places[1].iterdir()))


def test_a_key_gives_the_same_job_again_and_never_another(api: httpx.Client) -> None:
    mine = {"x-owner": "keeper", "idempotency-key": "k1"}
    post = functools.partial(api.post, JOBS, data={**SUMMARIZE, "length": "short"}, headers=mine)
    first = post(files={"file": ("a.txt", TEXT)})
    again = post(files={"file": ("a.txt", TEXT)})
    assert (first.status_code, again.status_code) == (202, 200)
    assert again.json()["id"] == first.json()["id"]
    assert len(api.get("/v1/files", headers=mine).json()["data"]) == 1
    for changed in (("b.txt", TEXT), ("a.txt", TEXT + b"!")):
        assert error_code(post(files={"file": changed})) == (409, "idempotency_conflict")
    assert error_code(post(files={"file": ("a.txt", TEXT)}, data=SUMMARIZE)) == (409, "idempotency_conflict")
    assert len(api.get("/v1/files", headers=mine).json()["data"]) == 1
    other = post(files={"file": ("a.txt", TEXT)}, headers={**mine, "x-owner": "other"})
    assert (other.status_code, other.json()["id"] == first.json()["id"]) == (202, False)


def test_a_key_holds_for_orders_in_json(api: httpx.Client) -> None:
    order = {**SUMMARIZE, "file_ids": [stored(api)]}
    key = {"idempotency-key": "k2"}
    first, again = (api.post(JOBS, json=order, headers=key) for _ in range(2))
    assert (first.status_code, again.status_code) == (202, 200)
    assert first.json()["id"] == again.json()["id"]
    other = api.post(JOBS, json={**order, "options": {"length": "long"}}, headers=key)
    assert error_code(other) == (409, "idempotency_conflict")
    assert error_code(api.post(JOBS, json=order, headers={"idempotency-key": "k" * 256})) == (400, "invalid_request")


def test_a_job_of_another_owner_is_not_there(api: httpx.Client) -> None:
    ann, bob = {"x-owner": "ann"}, {"x-owner": "bob"}
    file_id = stored(api, TEXT, "a.txt", **ann)
    job_id = started(api, file_id, headers=ann)["id"]
    assert error_code(api.post(JOBS, json={**SUMMARIZE, "file_ids": [file_id]}, headers=bob)) == (404, "not_found")
    for method, place in (("GET", ""), ("DELETE", ""), ("GET", "/events")):
        response = api.request(method, f"{JOBS}/{job_id}{place}", headers=bob)
        assert error_code(response) == (404, "not_found")
    assert api.get(JOBS, headers=bob).json()["data"] == []
    assert ended(api, job_id, **ann)["status"] == "done"


@pytest.mark.parametrize("job_id", ["job-1", "x", "file-" + "0" * 36, "é"])
def test_an_id_of_no_job_is_not_there(api: httpx.Client, job_id: str) -> None:
    for method, place in (("GET", ""), ("DELETE", ""), ("GET", "/events")):
        assert error_code(api.request(method, f"{JOBS}/{job_id}{place}")) == (404, "not_found")


def test_jobs_are_listed_by_status_the_newest_first(api: httpx.Client) -> None:
    mine = {"x-owner": "lister"}
    file_id = stored(api, TEXT, "a.txt", **mine)
    ids = [started(api, file_id, headers=mine)["id"] for _ in range(3)]
    for job_id in ids:
        ended(api, job_id, **mine)
    page = api.get(JOBS, params={"limit": 2, "status": "done"}, headers=mine).json()
    assert ([job["id"] for job in page["data"]], page["has_more"]) == (ids[:0:-1], True)
    assert page["data"][0]["results"] is None
    rest = api.get(JOBS, params={"after": ids[1]}, headers=mine).json()
    assert [job["id"] for job in rest["data"]] == ids[:1]
    assert api.get(JOBS, params={"status": "failed"}, headers=mine).json()["data"] == []
    for wrong in ({"status": "odd"}, {"limit": "x"}, {"after": "nothing"}):
        assert error_code(api.get(JOBS, params=wrong)) == (400, "invalid_request")


def test_a_job_that_has_ended_is_removed_with_its_results(api: httpx.Client) -> None:
    job = ended(api, started(api, stored(api))["id"])
    deleted = api.delete(f"{JOBS}/{job['id']}")
    assert deleted.json() == {"id": job["id"], "object": "job", "deleted": True}
    assert error_code(api.get(f"{JOBS}/{job['id']}")) == (404, "not_found")


def test_events_are_numbered_and_go_on_where_one_was(api: httpx.Client) -> None:
    job_id = started(api, stored(api, TEXT + b"Events."))["id"]
    path = f"{JOBS}/{job_id}/events"
    response = api.get(path)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = numbered_events_of(response.text)
    assert [number for number, _, _ in events] == list(range(1, len(events) + 1))
    assert {"progress", "delta", "result", "done"} == {name for _, name, _ in events}
    assert events[-1][2] == {"type": "done", "status": "done"}
    assert all(data["type"] == name for _, name, data in events)
    result = next(data for _, name, data in events if name == "result")
    assert (result["index"], result["name"]) == (0, "a.txt")
    assert result["result"] == ended(api, job_id)["results"][0]
    text = "".join(data["text"] for _, name, data in events if name == "delta")
    assert text == result["result"]["text"]
    assert numbered_events_of(api.get(path, headers={"last-event-id": "2"}).text) == events[2:]
    assert numbered_events_of(api.get(path, params={"after": 3}).text) == events[3:]
    assert numbered_events_of(api.get(path, params={"after": 1}, headers={"last-event-id": "4"}).text) == events[4:]
    assert numbered_events_of(api.get(path, params={"after": 999}).text) == []
    assert error_code(api.get(path, headers={"last-event-id": "x"})) == (400, "invalid_request")


def test_cancelling_ends_the_engines_work_and_the_events(reader: PageReader) -> None:
    engine = scripted(seconds_per_token=0.5)
    with serving(engine, reader=reader) as server, httpx.Client(base_url=server.url, timeout=60) as api:
        job_id = started(api, stored(api))["id"]
        wait_until(lambda: engine.started)
        followed: list[str] = []
        follower = threading.Thread(target=lambda: followed.append(api.get(f"{JOBS}/{job_id}/events").text))
        follower.start()
        cancelled = api.delete(f"{JOBS}/{job_id}").json()
        assert (cancelled["id"], cancelled["status"]) == (job_id, "cancelled")
        wait_until(lambda: engine.aborted)
        follower.join()
        assert events_of(followed[0])[-1] == ("done", {"type": "done", "status": "cancelled"})
        assert api.get(f"{JOBS}/{job_id}").json()["status"] == "cancelled"
        assert api.delete(f"{JOBS}/{job_id}").json()["deleted"] is True
    assert engine.finished == []


def test_more_jobs_than_may_wait_are_429_and_keep_nothing(reader: PageReader) -> None:
    engine = scripted(seconds_per_token=0.5)
    with (
        serving(engine, reader=reader, max_queued_jobs=1, max_concurrent_documents=1) as server,
        httpx.Client(base_url=server.url, timeout=60) as api,
    ):
        file_id = stored(api)
        started(api, file_id)
        wait_until(lambda: engine.started)
        started(api, file_id)
        refused = api.post(JOBS, files={"file": TEXT}, data=SUMMARIZE)
        assert error_code(refused) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) > 0
        assert len(api.get("/v1/files").json()["data"]) == 1


def test_a_job_goes_on_in_the_next_server(reader: PageReader, tmp_path: Path) -> None:
    slow, fast = scripted(seconds_per_token=0.5), scripted()
    seen: list[str] = []
    with (
        httpx.Client(timeout=60) as api,
        serving(slow, reader=reader, data_dir=tmp_path) as server,
    ):
        api.base_url = server.url
        job_id = started(api, stored(api))["id"]
        path = f"{JOBS}/{job_id}/events"

        def follow() -> None:
            with api.stream("GET", path) as response:
                for line in response.iter_lines():
                    seen.append(line)

        follower = threading.Thread(target=follow)
        follower.start()
        wait_until(lambda: slow.started and any(line.startswith("id: 2") for line in seen))
    follower.join(timeout=10)
    assert not follower.is_alive()
    assert slow.aborted
    assert not any('"type":"error"' in line for line in seen)
    first = [json.loads(line[6:]) for line in seen if line.startswith("data: ")]
    with serving(fast, reader=reader, data_dir=tmp_path) as server, httpx.Client(base_url=server.url) as api:
        rest = api.get(path, headers={"last-event-id": str(len(first))})
        job = ended(api, job_id)
    assert job["status"] == "done"
    events = [*first, *(data for _, data in events_of(rest.text))]
    assert [data["event"] for data in events if data["type"] == "progress"].count("page_read") == 1
    assert "".join(data["text"] for data in events if data["type"] == "delta") == job["results"][0]["text"]


def test_an_order_is_taken_while_the_model_loads_and_refused_while_the_server_ends(reader: PageReader) -> None:
    engine = scripted(state="starting")
    with serving(engine, reader=reader, shutdown_timeout=5.0) as server, httpx.Client(base_url=server.url) as api:
        job_id = started(api, stored(api))["id"]
        assert engine.started == []
        engine.state = "ready"
        assert ended(api, job_id)["status"] == "done"
        server.app.state.server.drain.begun.set()
        assert error_code(api.post(JOBS, files={"file": TEXT}, data=SUMMARIZE)) == (503, "shutting_down")


def test_what_is_silent_for_long_says_that_it_is_still_there(
    reader: PageReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmserve.server.sse.HEARTBEAT_SECONDS", 0.05)
    engine = scripted(seconds_per_token=0.5)
    with serving(engine, reader=reader) as server, httpx.Client(base_url=server.url, timeout=60) as api:
        job_id = started(api, stored(api))["id"]
        num_beats = 0
        with api.stream("GET", f"{JOBS}/{job_id}/events") as response:
            for line in response.iter_lines():
                num_beats += line.startswith(":")
                if num_beats == 4:
                    break
        api.delete(f"{JOBS}/{job_id}")
    assert num_beats == 4
