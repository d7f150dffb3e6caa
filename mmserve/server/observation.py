"""What is kept of every HTTP request: a log line, two metrics, and a span."""

import logging
import time
from contextlib import ExitStack
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mmserve.server.logs import ACCESS_LOGGER, start_fields
from mmserve.server.metrics import ServerMetrics
from mmserve.server.tracing import NoTracing

logger = logging.getLogger(ACCESS_LOGGER)

# Asked every few seconds by machines.
QUIET_ROUTES = frozenset({"/health", "/ready", "/metrics"})
METHODS = frozenset({"GET", "POST", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS"})


class Observation:
    """Inside of what names the request, around everything else.

    A request goes by its route's template (`/v1/files/{file_id}`): an address that is in no route has one name for all.
    """

    def __init__(self, app: ASGIApp, *, metrics: ServerMetrics, tracing: NoTracing) -> None:
        self.app = app
        self._metrics = metrics
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = _Observed(receive, send)
        fields = start_fields()
        started = time.perf_counter()
        with ExitStack() as stack:
            span = stack.enter_context(self._tracing.request(scope))
            try:
                await self.app(scope, request.receive, request.send)
            finally:
                seconds = time.perf_counter() - started
                method = scope["method"] if scope["method"] in METHODS else "other"
                route = _route(scope)
                self._metrics.observe_http(method, route, request.status, seconds)
                span.end_request(method, route, request.status, request.body_times)
                _log(fields, method, route, request.status, seconds)


class _Observed:
    """The status that was sent, 0 if none was, and when the body began and ended to arrive (`time.time_ns`)."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self.status = 0
        self.body_times: tuple[int, int] | None = None
        self._receive = receive
        self._send = send

    async def receive(self) -> Message:
        started = time.time_ns()
        message = await self._receive()
        if message["type"] == "http.request" and message.get("body"):
            first = started if self.body_times is None else self.body_times[0]
            self.body_times = (first, time.time_ns())
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)


def _route(scope: Scope) -> str:
    return getattr(scope.get("route"), "path", None) or "none"


def _log(fields: dict[str, Any], method: str, route: str, status: int, seconds: float) -> None:
    level = logging.DEBUG if route in QUIET_ROUTES else logging.INFO
    known = {"method": method, "route": route, "status": status, "seconds": round(seconds, 4), **fields}
    logger.log(level, "%s %s %d", method, route, status, extra={"fields": known})
