"""Spans of OpenTelemetry: a request, its upload, the pages, and what the engine did for it.

The engine knows nothing of them: it says how long things took (`RequestTimings`), and the spans are drawn afterwards.
"""

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from starlette.types import Scope

import mmserve
from mmserve.errors import SetupError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span, Tracer

    from mmserve.engine.client import RequestTimings

logger = logging.getLogger(__name__)

_SECOND = 1_000_000_000
# With any of these the environment asks for traces, as the specification of the SDK says.
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


class NoTracing:
    """The same methods, which do nothing."""

    def request(self, _scope: Scope) -> "AbstractContextManager[NoTracing]":
        return nullcontext(self)

    def task(self, _name: str) -> "AbstractContextManager[NoTracing]":
        return nullcontext(self)

    def observe(self, timings: "RequestTimings") -> None:
        pass

    def stage(self, name: str, seconds: float, attributes: Mapping[str, Any]) -> None:
        pass

    def end_request(self, method: str, route: str, status: int, body_times: tuple[int, int] | None) -> None:
        pass

    def close(self) -> None:
        pass


class Tracing(NoTracing):
    """Spans to `processor`; `close` sends what is left. Tasks carry along what is current."""

    def __init__(self, processor: "SpanProcessor") -> None:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider

        own = Resource.create({"service.name": "mmserve", "service.version": mmserve.__version__})
        # What OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say comes first.
        resource = own.merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer: Tracer = self._provider.get_tracer("mmserve", mmserve.__version__)

    @contextmanager
    def request(self, scope: Scope) -> "Iterator[RequestSpan]":
        """The span of an HTTP request, a child of the client's where that sent a `traceparent` (W3C)."""
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        parent = TraceContextTextMapPropagator().extract(headers)
        with self._tracer.start_as_current_span(
            scope["method"], parent, trace.SpanKind.SERVER, record_exception=False, set_status_on_exception=False
        ) as span:
            yield RequestSpan(self._tracer, span)

    @contextmanager
    def task(self, name: str) -> "Iterator[Tracing]":
        """The span of a task over one document. Failures are named, not quoted."""
        from opentelemetry.trace import Status, StatusCode

        with self._tracer.start_as_current_span(name, record_exception=False, set_status_on_exception=False) as span:
            try:
                yield self
            except BaseException as error:
                span.set_status(Status(StatusCode.ERROR, getattr(error, "code", type(error).__name__)))
                raise

    def stage(self, name: str, seconds: float, attributes: Mapping[str, Any]) -> None:
        """A span that ends now."""
        end = time.time_ns()
        self._span(name, end - int(seconds * _SECOND), end, attributes)

    def observe(self, timings: "RequestTimings") -> None:
        """The spans of one answer, within what is current where its reader is."""
        from opentelemetry import trace

        start = time.time_ns() - int((time.monotonic() - timings.started) * _SECOND)
        end = start + int(timings.e2e_seconds * _SECOND)
        attributes: dict[str, Any] = {
            "gen_ai.usage.input_tokens": timings.num_prompt_tokens,
            "gen_ai.usage.output_tokens": timings.num_output_tokens,
            "gen_ai.response.finish_reasons": (timings.finish_reason,),
        }
        answer = self._tracer.start_span("engine", start_time=start, attributes=attributes)
        with trace.use_span(answer):
            if timings.time_to_first_token is not None:
                admitted = start + int(timings.queue_seconds * _SECOND)
                first_token = start + int(timings.time_to_first_token * _SECOND)
                self._span("queue", start, admitted)
                if timings.encoder_seconds:
                    self._span("encoder", admitted, admitted + int(timings.encoder_seconds * _SECOND))
                self._span("prefill", admitted, first_token)
                self._span("decode", first_token, end)
        answer.end(end)

    def close(self) -> None:
        self._provider.shutdown()

    def _span(self, name: str, start: int, end: int, attributes: Mapping[str, Any] | None = None) -> None:
        self._tracer.start_span(name, start_time=start, attributes=attributes).end(max(start, end))


class RequestSpan(NoTracing):
    def __init__(self, tracer: "Tracer", span: "Span") -> None:
        self._tracer = tracer
        self._span = span

    def end_request(self, method: str, route: str, status: int, body_times: tuple[int, int] | None) -> None:
        from opentelemetry.trace import Status, StatusCode

        from mmserve.server.request_id import REQUEST_ID

        if body_times is not None:
            self._tracer.start_span("upload", start_time=body_times[0]).end(body_times[1])
        self._span.update_name(f"{method} {route}")
        self._span.set_attributes(
            {
                "http.request.method": method,
                "http.route": route,
                "http.response.status_code": status,
                "mmserve.request_id": REQUEST_ID.get() or "",
            }
        )
        if status >= 500 or status == 0:
            self._span.set_status(Status(StatusCode.ERROR))


def open_tracing(endpoint: str | None) -> NoTracing:
    """Traces to `endpoint` (OTLP over HTTP), or as the environment's OTEL_... say; with neither, none.

    Raises `SetupError` (`missing_dependency`) for an endpoint where the extra `otel` is not installed; the environment
    may be meant for other programs, too.
    """
    is_off = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if endpoint is None and (is_off or not any(os.environ.get(name) for name in _ENDPOINTS)):
        return NoTracing()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        missing = "traces need OpenTelemetry, which is not installed: pip install 'mmserve[otel]'"
        if endpoint is None:
            logger.warning("OTEL_... asks for traces, but %s", missing)
            return NoTracing()
        raise SetupError("missing_dependency", f"{missing}, or leave --otlp-traces-endpoint out") from None
    return Tracing(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
