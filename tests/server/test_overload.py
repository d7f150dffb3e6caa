"""More than the server can carry: what does not fit is refused at once, what was taken is finished."""

import asyncio
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import LiveServer, serving
from scripted_engine import ScriptedEngine

from mmserve.config import EngineConfig, SchedulerConfig
from mmserve.errors import EngineError
from mmserve.request import SamplingParams
from mmserve.server.app import create_app
from mmserve.server.owners import LOCAL_OWNER
from mmserve.server.settings import ServerSettings
from mmserve.vision.page_types import PageOptions
from mmserve.vision.pages import PageReader

sys.path.append(str(Path(__file__).parent.parent))

import overload

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
NOTE = {"file": ("note.txt", b"The invoice is due in June.", "text/plain")}


class NarrowEngine(ScriptedEngine):
    """Refuses, as the real one does, what comes when as many wait as may."""

    num_inside = 0

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        scheduler = self.config.scheduler
        if self.num_inside >= scheduler.max_num_seqs + scheduler.max_num_waiting:
            raise EngineError("queue_full", "too many requests are waiting already")
        self.num_inside += 1
        try:
            async for delta in super().generate(*args, **kwargs):
                yield delta
        finally:
            self.num_inside -= 1


def fill(server: LiveServer, name: str, num_places: int) -> None:
    getattr(server.app.state.server, name).num_in_flight = num_places


def test_documents_that_wait_take_no_place_from_chat_nor_chat_from_documents() -> None:
    engine = ScriptedEngine(answer="The invoice is due in June.")
    reader = PageReader(options=PageOptions(ocr="off"), num_workers=1)
    try:
        with serving(engine, reader=reader) as server:
            fill(server, "document_gate", 6)
            assert httpx.post(f"{server.url}/v1/summarize", files=NOTE).status_code == 429
            assert httpx.post(server.url + CHAT, json=HELLO).status_code == 200
            fill(server, "document_gate", 0)
            fill(server, "gate", 4)
            assert httpx.post(server.url + CHAT, json=HELLO).status_code == 429
            assert httpx.post(f"{server.url}/v1/summarize", files=NOTE).status_code == 200
    finally:
        reader.close()


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/summarize", "/v1/ask", "/v1/extract", "/v1/transcribe"])
def test_a_full_queue_refuses_before_it_looks_at_the_body(path: str) -> None:
    with serving(ScriptedEngine()) as server:
        headers = {"Content-Type": "application/json"}
        looked_at = httpx.post(server.url + path, content=b"{", headers=headers)
        fill(server, "gate", 4)
        fill(server, "document_gate", 6)
        refused = httpx.post(server.url + path, content=b"{", headers=headers)
        metrics = httpx.get(f"{server.url}/metrics").text
    assert looked_at.status_code == 400
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert int(refused.headers["retry-after"]) > 0
    assert f'mmserve_http_requests_total{{method="POST",route="{path}",status="429"}} 1.0' in metrics


def test_what_was_admitted_waits_for_the_engine_and_is_not_refused_by_it(tmp_path: Path) -> None:
    """A document sends its many requests without asking the gate for each."""
    config = EngineConfig(scheduler=SchedulerConfig(max_num_seqs=1, max_num_waiting=4))
    engine = NarrowEngine(answer="x" * 20, config=config)
    app = create_app(engine, reader=None, settings=ServerSettings(data_dir=tmp_path))  # type: ignore[arg-type]
    owned = app.state.server.engine_for(LOCAL_OWNER)

    async def ask() -> str:
        return "".join([delta.text async for delta in owned.generate([65], SamplingParams())])

    async def ask_all() -> list[str]:
        return await asyncio.gather(*(ask() for _ in range(12)))

    assert asyncio.run(ask_all()) == ["x" * 20] * 12


def test_five_times_the_capacity_loses_no_request() -> None:
    """The long run's program for seconds: docs/reliability.md has its figures."""
    options = overload.parse(
        ["--seconds=4", "--capacity-seconds=1", "--share-of-documents=0.3", "--max-num-seqs=2", "--max-num-waiting=4"]
    )
    result = overload.run(options)
    assert result["lost"] == []
    assert result["num_lost"] == 0
    assert {outcome.split()[1] for outcome in result["outcomes"]} <= {"200", "429"}
    assert any(outcome.startswith("chat 200") for outcome in result["outcomes"])
    assert result["is_answered_afterwards"]
    assert result["max_waiting"] <= 4
