"""How much one owner may take: requests in a time, places, documents at once, seconds for an upload."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import httpx
import pytest
from live_server import LiveServer, serving, wait_until
from scripted_engine import ScriptedEngine

from mmserve.commands.options import DocumentOptions
from mmserve.errors import EngineError, RequestError
from mmserve.request import SamplingParams
from mmserve.server.access import KeyRing
from mmserve.server.limits import AdmissionGate
from mmserve.server.owners import FairSlots, OwnerEngine
from mmserve.server.rate_limit import parse_rate
from mmserve.server.settings import AccessSettings, ServerSettings

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"


def as_owner(key: str) -> dict[str, str]:
    return {"X-Api-Key": key}


# Requests in a time


@pytest.fixture
def limited() -> Iterator[LiveServer]:
    access = AccessSettings(keys=KeyRing([f"alice:{ALICE}", f"bob:{BOB}"]), rate_limit="3/hour")
    with serving(ScriptedEngine(), access=access) as live:
        yield live


def test_a_key_may_ask_so_often_and_another_key_as_often(limited: LiveServer) -> None:
    def ask(key: str) -> httpx.Response:
        return httpx.post(limited.url + CHAT, json=HELLO, headers=as_owner(key))

    answers = [ask(ALICE) for _ in range(5)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429, 429]
    assert [answer.headers["ratelimit-remaining"] for answer in answers] == ["2", "1", "0", "0", "0"]
    assert {answer.headers["ratelimit-limit"] for answer in answers} == {"3"}
    refused = answers[-1]
    assert refused.json()["error"]["code"] == "rate_limited"
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert "3 per 1 hour" in refused.json()["error"]["message"]
    assert 0 < int(refused.headers["retry-after"]) <= 3600
    assert refused.headers["ratelimit-reset"] == refused.headers["retry-after"]
    assert ask(BOB).status_code == 200


def test_a_wrong_request_counts_and_looking_does_not(limited: LiveServer) -> None:
    for _ in range(5):
        looked = httpx.get(f"{limited.url}/v1/models", headers=as_owner(ALICE))
        assert looked.status_code == 200
        assert "ratelimit-limit" not in looked.headers
        assert httpx.get(f"{limited.url}/health").status_code == 200
    statuses = [httpx.post(limited.url + CHAT, content=b"", headers=as_owner(ALICE)).status_code for _ in range(4)]
    assert statuses == [415, 415, 415, 429]


def test_a_wrong_key_takes_nothing_from_anybody(limited: LiveServer) -> None:
    for _ in range(5):
        assert httpx.post(limited.url + CHAT, json=HELLO, headers=as_owner("wrong")).status_code == 401
    assert httpx.post(limited.url + CHAT, json=HELLO, headers=as_owner(ALICE)).status_code == 200


def test_without_keys_all_are_one_owner() -> None:
    with serving(ScriptedEngine(), access=AccessSettings(rate_limit="1/minute")) as server:
        assert [httpx.post(server.url + CHAT, json=HELLO).status_code for _ in range(2)] == [200, 429]


@pytest.mark.parametrize("rate", ["", "fast", "0/minute", "-1/minute", "5/blink"])
def test_a_rate_that_is_none_is_an_error_at_start(rate: str) -> None:
    with pytest.raises(RequestError, match="--rate-limit"):
        AccessSettings(rate_limit=rate)


def test_rates_may_be_written_as_people_do() -> None:
    assert parse_rate("60/minute").amount == 60
    assert parse_rate("1000 per 2 hours").get_expiry() == 7200


# Places


def test_one_owner_holds_half_of_the_places_where_there_are_several() -> None:
    gate = AdmissionGate(max_in_flight=4, max_waiting=9, num_waiting=int, has_owners=True)
    with gate.admit(1, "a"), gate.admit(1, "a"):
        with pytest.raises(EngineError, match="your requests") as caught, gate.admit(1, "a"):
            pass
        assert caught.value.code == "queue_full"
        with gate.admit(2, "b"):
            assert gate.num_in_flight == 4
    with gate.admit(2, "a"):
        assert gate.num_in_flight == 2
    with pytest.raises(RequestError, match="2 answers at most"), gate.admit(3, "a"):
        pass
    assert gate.num_in_flight == 0
    assert not gate._num_of_owner


def test_the_only_owner_may_hold_all_places() -> None:
    gate = AdmissionGate(max_in_flight=4, max_waiting=9, num_waiting=int)
    with gate.admit(4, "a"):
        assert gate.num_in_flight == 4


def test_a_key_that_floods_the_server_leaves_room_for_another() -> None:
    access = AccessSettings(keys=KeyRing([f"alice:{ALICE}", f"bob:{BOB}"]))
    engine = ScriptedEngine(answer="x" * 4000, seconds_per_token=0.01)
    with serving(engine, access=access) as server:
        flood = [
            threading.Thread(
                target=httpx.post,
                args=(server.url + CHAT,),
                kwargs={"json": {**HELLO, "max_tokens": 60}, "headers": as_owner(ALICE), "timeout": 30},
            )
            for _ in range(2)
        ]
        for thread in flood:
            thread.start()
        wait_until(lambda: len(engine.started) == 2)
        refused = httpx.post(server.url + CHAT, json=HELLO, headers=as_owner(ALICE))
        let_in = httpx.post(server.url + CHAT, json={**HELLO, "max_tokens": 1}, headers=as_owner(BOB))
        for thread in flood:
            thread.join()
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert int(refused.headers["retry-after"]) > 0
    assert let_in.status_code == 200


def test_what_one_owner_has_in_the_queue_stands_before_no_other() -> None:
    engine = ScriptedEngine(answer="x")
    engine_places = FairSlots(2)

    async def ask(owner: str, number: int, params: SamplingParams) -> None:
        through = OwnerEngine(engine, owner, places=engine_places)
        async for _ in through.generate([65], params, request_id=f"{owner}{number}"):
            pass

    async def scenario() -> None:
        engine.seconds_per_token = 0.001
        asks = [asyncio.create_task(ask("a", number, SamplingParams())) for number in range(20)]
        asks.append(asyncio.create_task(ask("b", 0, SamplingParams())))
        await asyncio.sleep(0)
        assert len(engine.started) <= 2
        await asyncio.gather(*asks)

    asyncio.run(scenario())
    assert len(engine.finished) == 21
    assert engine.started.index("b0") == 2, "after the two that had begun"
    assert engine_places._num_free == 2


def test_an_owner_who_leaves_while_waiting_for_the_engine_asks_nothing_of_it() -> None:
    engine = ScriptedEngine(answer="xx", seconds_per_token=60.0)
    engine_places = FairSlots(1)

    async def first(owner: str) -> None:
        async with aclosing(
            OwnerEngine(engine, owner, places=engine_places).generate([65], SamplingParams())
        ) as deltas:
            await anext(deltas)

    async def scenario() -> None:
        tasks = [asyncio.create_task(first(owner)) for owner in ("a", "b")]
        await asyncio.sleep(0.01)
        for task in reversed(tasks):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(scenario())
    assert (len(engine.started), len(engine.aborted)) == (1, 1)
    assert engine_places._num_free == 1


# Documents at once


class Worker:
    """Documents of several owners that wait for a place; `order` is that in which they got one."""

    def __init__(self, num_slots: int, **settings: Any) -> None:
        self.slots = FairSlots(num_slots, **settings)
        self.order: list[str] = []
        self.releases: dict[str, asyncio.Event] = {}

    async def start(self, *names: str) -> list["asyncio.Task[None]"]:
        """`a1` is the first document of owner a."""
        tasks = [asyncio.create_task(self._work(name)) for name in names]
        await asyncio.sleep(0)
        return tasks

    async def finish(self, name: str) -> None:
        self.releases[name].set()
        for _ in range(3):
            await asyncio.sleep(0)

    async def _work(self, name: str) -> None:
        self.releases[name] = asyncio.Event()
        async with self.slots.of(name[0]):
            self.order.append(name)
            await self.releases[name].wait()


def test_a_place_goes_to_the_owner_who_holds_fewest() -> None:
    async def scenario() -> None:
        worker = Worker(2)
        tasks = await worker.start("a1", "a2", "a3", "a4", "b1", "b2", "c1")
        assert worker.order == ["a1", "a2"]
        assert worker.slots.num_waiting == 5
        await worker.finish("a1")
        assert worker.order[2:] == ["b1"], "a holds one, b and c none, and b came first"
        await worker.finish("b1")
        assert worker.order[3:] == ["c1"], "b has had its turn"
        await worker.finish("c1")
        assert worker.order[4:] == ["b2"]
        await worker.finish("a2")
        assert worker.order[5:] == ["a3"], "a holds none now"
        await worker.finish("b2")
        assert worker.order[6:] == ["a4"], "nobody else waits"
        for name in ("a3", "a4"):
            await worker.finish(name)
        await asyncio.gather(*tasks)
        assert not worker.slots._num_held
        assert not worker.slots.num_waiting
        assert worker.slots._num_free == 2

    asyncio.run(scenario())


def test_within_one_owner_it_is_first_come_first_served() -> None:
    async def scenario() -> None:
        worker = Worker(1)
        tasks = await worker.start("a1", "a2", "a3")
        for name in ("a1", "a2", "a3"):
            assert worker.order[-1] == name
            await worker.finish(name)
        await asyncio.gather(*tasks)

    asyncio.run(scenario())


def test_who_leaves_while_waiting_takes_no_place_along() -> None:
    async def scenario() -> None:
        worker = Worker(1)
        first, second, third = await worker.start("a1", "b1", "c1")
        second.cancel()
        await worker.finish("a1")
        assert worker.order == ["a1", "c1"]
        third.cancel()
        await asyncio.gather(first, second, third, return_exceptions=True)
        assert not worker.slots._waiting
        (last,) = await worker.start("a2")
        await worker.finish("a2")
        await last
        assert worker.slots._num_free == 1

    asyncio.run(scenario())


def test_who_is_told_to_leave_just_as_its_turn_comes_gives_it_back() -> None:
    async def scenario() -> None:
        worker = Worker(1)
        first, second = await worker.start("a1", "b1")
        worker.releases["a1"].set()
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        assert worker.order == ["a1"]
        assert worker.slots._num_free == 1

    asyncio.run(scenario())


def test_waiting_for_a_turn_has_an_end() -> None:
    async def scenario() -> None:
        worker = Worker(1, wait_seconds=0.01)
        (first,) = await worker.start("a1")
        (second,) = await worker.start("b1")
        with pytest.raises(EngineError, match=r"has waited 0\.01 seconds") as caught:
            await second
        assert caught.value.code == "queue_full"
        await worker.finish("a1")
        await first
        assert worker.slots._num_free == 1

    asyncio.run(scenario())


# An upload's time


@contextmanager
def connected(server: LiveServer) -> Iterator[socket.socket]:
    with socket.create_connection(server.socket.getsockname(), timeout=10) as connection:
        yield connection


@pytest.mark.parametrize("path", [CHAT, "/v1/summarize"])
def test_a_body_that_trickles_in_is_given_up(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmserve.server.limits.LINGER_SECONDS", 0.1)
    content_type = "application/json" if path == CHAT else "multipart/form-data; boundary=b"
    with serving(ScriptedEngine(), upload_timeout=0.3) as server, connected(server) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: t\r\nContent-Type: {content_type}\r\nContent-Length: 99999\r\n\r\n"
        start = '--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        connection.sendall((head + start).encode())
        ended = threading.Event()

        def trickle() -> None:
            while not ended.is_set():
                try:
                    connection.sendall(b"x")
                except OSError:
                    return
                time.sleep(0.02)

        sender = threading.Thread(target=trickle)
        sender.start()
        answer = connection.recv(4096)
        ended.set()
        sender.join()
        assert answer.startswith(b"HTTP/1.1 408")
        assert httpx.get(f"{server.url}/health").status_code == 200


# Options


@pytest.mark.parametrize(
    ("settings", "option"),
    [
        ({"upload_timeout": 0}, "--upload-timeout"),
        ({"queue_timeout": 0}, "--queue-timeout"),
        ({"request_timeout": -1}, "--request-timeout"),
        ({"max_files": 0}, "--max-files"),
        ({"max_upload_bytes": 0}, "--max-upload-size"),
        ({"max_images_per_request": 0}, "--max-images-per-request"),
        ({"max_concurrent_documents": 0}, "--max-concurrent-documents"),
    ],
)
def test_a_limit_that_is_none_is_an_error_that_names_its_option(settings: dict[str, Any], option: str) -> None:
    with pytest.raises(RequestError, match=option):
        ServerSettings(**settings)


def test_limits_of_pages_are_options() -> None:
    limits = DocumentOptions(max_pages=3, max_file_bytes="1MiB", max_page_pixels=1000, page_timeout=2.5).to_limits()
    assert (limits.max_pages, limits.max_bytes, limits.max_pixels, limits.page_timeout) == (3, 2**20, 1000, 2.5)
