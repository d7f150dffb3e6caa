"""Files, jobs and results of one key are not there for another, and stay with a name when its key changes."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import LiveServer, serving, wait_until
from scripted_engine import ScriptedEngine

from mmserve.server.access import KeyRing
from mmserve.server.settings import AccessSettings
from mmserve.vision.pages import PageReader

ALICE, BOB, ALICE_AGAIN = "alice-0123456789abcdef", "bob-0123456789abcdef", "alice-again-0123456789"
TEXT = b"Invoice of Hallam Pumps. The total is 1,284.50 EUR. It is due on 12 March.\n"


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(answer="The total is 1,284.50 EUR.", max_model_len=30_000)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"alice:{ALICE}\nbob:{BOB}\n")
    return path


@pytest.fixture
def server(engine: ScriptedEngine, keys: Path) -> Iterator[LiveServer]:
    reader = PageReader(num_workers=1)
    with serving(engine, reader=reader, access=AccessSettings(keys=KeyRing(path=keys))) as live:
        yield live
    reader.close()


@pytest.fixture
def alice(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {ALICE}"}, timeout=30) as client:
        yield client


@pytest.fixture
def bob(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers={"X-Api-Key": BOB}, timeout=30) as client:
        yield client


def stored(client: httpx.Client) -> str:
    answer = client.post("/v1/files", files={"file": ("invoice.txt", TEXT)})
    assert answer.status_code == 200, answer.text
    file_id: str = answer.json()["id"]
    return file_id


def listed(client: httpx.Client, kind: str) -> list[str]:
    return [item["id"] for item in client.get(f"/v1/{kind}").json()["data"]]


def is_hidden(response: httpx.Response) -> bool:
    return response.status_code == 404 and response.json()["error"]["code"] == "not_found"


def test_a_file_is_there_for_its_owner_alone(alice: httpx.Client, bob: httpx.Client) -> None:
    file_id = stored(alice)
    path = f"/v1/files/{file_id}"
    for address in (path, f"{path}/content", f"{path}/pages/1"):
        assert is_hidden(bob.get(address))
    assert is_hidden(bob.post("/v1/summarize", json={"file_id": file_id}))
    assert is_hidden(bob.post("/v1/jobs", json={"task": "summarize", "file_ids": [file_id]}))
    assert is_hidden(bob.delete(path))
    assert listed(bob, "files") == []
    assert bob.get("/v1/files", params={"after": file_id}).json()["data"] == []
    assert alice.get(f"{path}/content").content == TEXT
    assert alice.post("/v1/summarize", json={"file_id": file_id}).status_code == 200
    assert listed(alice, "files") == [file_id]


def test_a_result_is_cached_for_its_owner_alone(alice: httpx.Client, bob: httpx.Client, engine: ScriptedEngine) -> None:
    def is_cached(client: httpx.Client) -> Any:
        answer = client.post("/v1/summarize", files={"file": ("invoice.txt", TEXT)})
        assert answer.status_code == 200, answer.text
        return answer.json()["cached"]

    assert [is_cached(client) for client in (alice, bob, alice, bob)] == [False, False, True, True]
    assert len(set(engine.salts)) == 2
    assert b"" not in engine.salts


def test_a_job_and_its_idempotency_key_are_there_for_its_owner_alone(alice: httpx.Client, bob: httpx.Client) -> None:
    def start(client: httpx.Client) -> httpx.Response:
        body = {"task": "summarize", "file_ids": [stored(client)]}
        return client.post("/v1/jobs", json=body, headers={"Idempotency-Key": "order-7"})

    mine, others = start(alice), start(bob)
    assert (mine.status_code, others.status_code) == (202, 202), mine.text + others.text
    job_id = mine.json()["id"]
    assert job_id != others.json()["id"]
    path = f"/v1/jobs/{job_id}"
    wait_until(lambda: alice.get(path).json()["status"] == "done", seconds=30)
    assert is_hidden(bob.get(path))
    assert is_hidden(bob.get(f"{path}/events"))
    assert is_hidden(bob.delete(path))
    assert listed(bob, "jobs") == [others.json()["id"]]
    assert alice.get(path).json()["status"] == "done"


def test_another_key_of_the_same_name_keeps_its_files(alice: httpx.Client, keys: Path) -> None:
    file_id = stored(alice)
    changed = keys.with_suffix(".new")
    changed.write_text(f"alice:{ALICE_AGAIN}\nbob:{BOB}\n")
    os.replace(changed, keys)
    assert alice.get("/v1/files").status_code == 401
    alice.headers["Authorization"] = f"Bearer {ALICE_AGAIN}"
    assert listed(alice, "files") == [file_id]
