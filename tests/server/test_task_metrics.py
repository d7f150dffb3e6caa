"""Counters and seconds of tasks and of HTTP requests, under labels that nobody outside can add to."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from live_server import LiveServer, serving, wait_until
from prometheus_client import CollectorRegistry
from scripted_engine import ScriptedEngine

from mmserve.errors import DocumentError
from mmserve.pipelines.events import DocumentOpened, Event, PageRead, PageReport, RequestSubmitted
from mmserve.server.task_metrics import TaskMetrics, TaskObserver
from mmserve.server.tracing import NoTracing
from mmserve.vision.page_types import PageOptions, TextSource
from mmserve.vision.pages import PageReader


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)


def page(number: int, source: TextSource) -> PageRead:
    return PageRead(PageReport(number, source, is_blank=False), number, 3)


def test_a_task_is_counted_by_how_it_ends_and_its_pages_by_where_text_came_from(registry: CollectorRegistry) -> None:
    metrics, heard = TaskMetrics(registry), list[Event]()
    events: list[Event] = [
        DocumentOpened("private.pdf", 3),
        page(1, "text_layer"),
        page(2, "ocr"),
        RequestSubmitted("whole", 0, 1, 2),
        page(3, "ocr"),
    ]
    with TaskObserver("summarize", metrics, NoTracing(), heard.append) as tell:
        for event in events:
            tell(event)
    assert heard == events
    with pytest.raises(DocumentError), TaskObserver("ask", metrics, NoTracing()):
        raise DocumentError("corrupt_document", "private.pdf is damaged")
    with pytest.raises(asyncio.CancelledError), TaskObserver("ask", metrics, NoTracing()):
        raise asyncio.CancelledError
    assert value(registry, "mmserve_documents_total", task="summarize", status="done") == 1
    assert value(registry, "mmserve_documents_total", task="ask", status="failed") == 1
    assert value(registry, "mmserve_documents_total", task="ask", status="cancelled") == 1
    assert value(registry, "mmserve_pages_total", source="text_layer") == 1
    assert value(registry, "mmserve_pages_total", source="ocr") == 2
    for stage in ("opening", "pages", "asking", "total"):
        assert value(registry, "mmserve_stage_seconds_count", task="summarize", stage=stage) == 1
    assert value(registry, "mmserve_stage_seconds_count", task="ask", stage="asking") is None
    assert value(registry, "mmserve_stage_seconds_count", task="ask", stage="total") == 2


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with serving(ScriptedEngine()) as live:
        yield live


def http_lines(server: LiveServer) -> list[str]:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return [line for line in lines if line.startswith("mmserve_http_requests_total")]


def test_http_requests_are_counted_by_route_whatever_is_asked_for(server: LiveServer) -> None:
    body: Any = {"messages": [{"role": "user", "content": "hi"}]}
    assert httpx.post(f"{server.url}/v1/chat/completions", json=body).status_code == 200
    assert httpx.post(f"{server.url}/v1/chat/completions", json={}).status_code == 400
    for name in ("a", "b", "c"):
        assert httpx.get(f"{server.url}/v1/models/{name}").status_code == 404
        assert httpx.get(f"{server.url}/nowhere/{name}").status_code == 404
        assert httpx.request(f"X{name}", f"{server.url}/health").status_code == 405
    lines = http_lines(server)
    for method, route, status, count in (
        ("POST", "/v1/chat/completions", 200, 1),
        ("POST", "/v1/chat/completions", 400, 1),
        ("GET", "/v1/models/{model_id:path}", 404, 3),
        ("GET", "none", 404, 3),
        ("other", "/health", 405, 3),
    ):
        labels = f'{{method="{method}",route="{route}",status="{status}"}}'
        assert f"mmserve_http_requests_total{labels} {count}.0" in lines, lines


def test_jobs_are_counted_and_observed_as_requests_are() -> None:
    reader = PageReader(options=PageOptions(ocr="off"), num_workers=1)
    with serving(ScriptedEngine(), reader=reader) as server:
        content = b"The invoice of May is due in June. It is over 30 euros."
        files = {"file": ("a.txt", content, "text/plain")}
        sent = httpx.post(f"{server.url}/v1/jobs", data={"task": "summarize"}, files=files)
        assert sent.status_code == 202, sent.text
        job = f"{server.url}/v1/jobs/{sent.json()['id']}"
        wait_until(lambda: httpx.get(job).json()["status"] == "done", seconds=30)
        lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    reader.close()
    assert 'mmserve_jobs_total{status="done",task="summarize"} 1.0' in lines
    assert "mmserve_jobs_running 0.0" in lines
    assert 'mmserve_documents_total{status="done",task="summarize"} 1.0' in lines
    assert 'mmserve_pages_total{source="text_layer"} 1.0' in lines
    assert 'mmserve_stage_seconds_count{stage="total",task="summarize"} 1.0' in lines
