"""Traces of a document from the client's span down to the engine's work, collected in memory."""

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import LiveServer, serving, wait_until
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from vision_checkpoint import save_vision_model

from mmserve.commands.options import VisionOptions
from mmserve.config import CacheConfig, EngineConfig
from mmserve.engine.client import EngineClient
from mmserve.errors import SetupError
from mmserve.server.tracing import NoTracing, Tracing, open_tracing
from mmserve.vision.page_types import PageLimits, PageOptions
from mmserve.vision.pages import PageReader

SAMPLES = Path(__file__).parents[2] / "samples"
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def server(exporter: InMemorySpanExporter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    model = save_vision_model(tmp_path_factory.mktemp("vision"))
    cache = CacheConfig(memory_bytes=8 * 1024**2)
    engine = EngineClient.start(EngineConfig(model=str(model), num_threads=1, cache=cache))
    reader = PageReader(options=PageOptions(ocr="off"), num_workers=1)
    prompts = VisionOptions(num_preprocess_workers=1).open_prompts(engine, PageLimits())
    try:
        engine.wait_until_ready()
        with serving(engine, reader=reader, prompts=prompts, tracing=Tracing(SimpleSpanProcessor(exporter))) as live:
            yield live
    finally:
        prompts.close()
        reader.close()
        engine.close()


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> InMemorySpanExporter:
    exporter.clear()
    return exporter


def ended(exporter: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    """All that was finished by the time a span of this name was."""
    wait_until(lambda: any(span.name == name for span in exporter.get_finished_spans()))
    return list(exporter.get_finished_spans())


def by_name(spans: list[ReadableSpan], name: str) -> ReadableSpan:
    return next(span for span in spans if span.name == name)


def parent_of(spans: list[ReadableSpan], span: ReadableSpan) -> str | None:
    """The name of a span's parent."""
    parent = span.parent
    return None if parent is None else next((s.name for s in spans if s.context.span_id == parent.span_id), "client")


def test_a_document_is_followed_from_the_client_into_the_engine(
    server: LiveServer, spans: InMemorySpanExporter
) -> None:
    document = next(path for path in sorted(SAMPLES.iterdir()) if path.suffix == ".pdf")
    files = {"file": ("private name.pdf", document.read_bytes())}
    data = {"mode": "vision", "max_tokens": "8", "pages": "1"}
    headers = {**TRACEPARENT, "X-Request-Id": "mine-1"}
    response = httpx.post(f"{server.url}/v1/summarize", files=files, data=data, headers=headers, timeout=120)
    assert response.status_code == 200, response.text
    found = ended(spans, "POST /v1/summarize")
    assert {f"{span.context.trace_id:032x}" for span in found} == {TRACE_ID}
    expected = {
        "POST /v1/summarize": "client",
        "upload": "POST /v1/summarize",
        "summarize": "POST /v1/summarize",
        "pages": "summarize",
        "engine": "summarize",
        "queue": "engine",
        "encoder": "engine",
        "prefill": "engine",
        "decode": "engine",
    }
    assert {span.name: parent_of(found, span) for span in found} == expected
    request, engine = by_name(found, "POST /v1/summarize"), by_name(found, "engine")
    assert request.attributes is not None
    assert request.attributes["http.response.status_code"] == 200
    assert request.attributes["mmserve.request_id"] == "mine-1"
    assert engine.attributes is not None
    usage = response.json()["usage"]
    assert engine.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert engine.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert "private name" not in "".join(span.to_json() for span in found)
    prefill, decode = by_name(found, "prefill"), by_name(found, "decode")
    for earlier, later in ((by_name(found, "queue"), prefill), (prefill, decode)):
        assert earlier.end_time == later.start_time
    for span in found:
        assert span.start_time is not None
        assert span.end_time is not None
        assert 0 <= span.end_time - span.start_time < 120e9


def test_requests_that_fail_say_so_without_words(server: LiveServer, spans: InMemorySpanExporter) -> None:
    files = {"file": ("private name.pdf", b"%PDF-1.7 nothing more")}
    assert httpx.post(f"{server.url}/v1/summarize", files=files, timeout=60).status_code == 422
    found = ended(spans, "POST /v1/summarize")
    task = by_name(found, "summarize")
    assert (task.status.status_code, task.status.description) == (StatusCode.ERROR, "corrupt_document")
    assert by_name(found, "POST /v1/summarize").status.status_code is StatusCode.UNSET
    assert not task.events
    assert "private name" not in "".join(span.to_json() for span in found)


def test_answers_in_a_stream_are_followed_as_well(server: LiveServer, spans: InMemorySpanExporter) -> None:
    body: Any = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stream": True, "n": 2}
    assert httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=TRACEPARENT, timeout=60).is_success
    found = ended(spans, "POST /v1/chat/completions")
    assert [parent_of(found, span) for span in found if span.name == "engine"] == ["POST /v1/chat/completions"] * 2


# Where traces go


def test_no_traces_unless_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    assert type(open_tracing(None)) is NoTracing
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    by_environment = open_tracing(None)
    assert isinstance(by_environment, Tracing)
    by_environment.close()
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert type(open_tracing(None)) is NoTracing


def test_without_the_extra_an_endpoint_is_an_error_and_the_environment_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    monkeypatch.delenv("OTEL_SDK_DISABLED", raising=False)
    with pytest.raises(SetupError, match=r"pip install 'mmserve\[otel\]'") as caught:
        open_tracing("http://127.0.0.1:9/v1/traces")
    assert caught.value.code == "missing_dependency"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    assert type(open_tracing(None)) is NoTracing
    assert "mmserve[otel]" in caplog.text


def test_spans_reach_an_endpoint_at_the_latest_when_the_server_ends() -> None:
    received: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        tracing = open_tracing(f"http://127.0.0.1:{collector.server_port}/v1/traces")
        with tracing.task("transcribe"):
            pass
        tracing.close()
        collector.shutdown()
        thread.join()
    ((path, content),) = received
    assert path == "/v1/traces"
    for part in (b"transcribe", b"service.name", b"mmserve"):
        assert part in content
