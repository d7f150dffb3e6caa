"""How much the server takes: bytes of a body, and requests that wait."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mmserve.errors import EngineError, RequestError
from mmserve.server.errors import BodyStalled, BodyTooLarge, BodyTooSlow, as_mmserve_error, error_response
from mmserve.server.owners import owner_of

LINGER_SECONDS = 5.0
STALL_SECONDS = 20.0


class BodyLimit:
    """Counts a body's bytes while they arrive, so that the cap holds with and without Content-Length.

    `limits` maps path prefixes to bytes of a multipart body, which goes to disk; `default` is for all others. A body
    has `timeout` seconds to arrive. One that nobody wants, because the answer is known before its end, is read on and
    thrown away for `LINGER_SECONDS`: most clients look for the answer only when they have sent everything.
    """

    def __init__(self, app: ASGIApp, *, default: int, limits: Mapping[str, int], timeout: float) -> None:
        self.app = app
        self.timeout = timeout
        self.default = default
        self.limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        is_multipart = headers.get(b"content-type", b"").lower().startswith(b"multipart/")
        limit_bytes = self._limit(scope["path"]) if is_multipart else self.default
        body = _CountedBody(receive, limit_bytes, self.timeout)
        if _sends_unasked(headers):
            send = body.lingering(send)
        if _declared_length(headers) > limit_bytes:
            await error_response(as_mmserve_error(BodyTooLarge(limit_bytes)))(scope, receive, send)
            return
        await self.app(scope, body.receive, send)

    def _limit(self, path: str) -> int:
        return next((limit for prefix, limit in self.limits.items() if path.startswith(prefix)), self.default)


class _CountedBody:
    def __init__(self, receive: Receive, limit_bytes: int, timeout: float) -> None:
        self._receive = receive
        self._limit_bytes = limit_bytes
        self._timeout = timeout
        self._deadline = asyncio.get_running_loop().time() + timeout
        self._num_bytes = 0
        self._is_complete = False

    async def receive(self) -> Message:
        """The next message. Who stops in mid-body, or trickles on, is not waited for: it would hold up the end."""
        left = self._deadline - asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(None if self._is_complete else min(STALL_SECONDS, left)):
                message = await self._receive()
        except TimeoutError:
            raise (BodyStalled(STALL_SECONDS) if left > STALL_SECONDS else BodyTooSlow(self._timeout)) from None
        if message["type"] == "http.request":
            self._num_bytes += len(message.get("body", b""))
            self._is_complete = not message.get("more_body", False)
            if self._num_bytes > self._limit_bytes:
                raise BodyTooLarge(self._limit_bytes)
        else:
            self._is_complete = True
        return message

    def lingering(self, send: Send) -> Send:
        """A `send` that holds an early answer's end back until the rest of the body was thrown away."""

        async def send_then_discard(message: Message) -> None:
            is_end = message["type"] == "http.response.body" and not message.get("more_body", False)
            if self._is_complete or not is_end:
                await send(message)
                return
            await send({**message, "more_body": True})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER_SECONDS):
                    await self._discard()
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        return send_then_discard

    async def _discard(self) -> None:
        while not self._is_complete:
            message = await self._receive()
            self._is_complete = message["type"] != "http.request" or not message.get("more_body", False)


def _declared_length(headers: Mapping[bytes, bytes]) -> int:
    declared = headers.get(b"content-length", b"0")
    return int(declared) if declared.isdigit() else 0


def _sends_unasked(headers: Mapping[bytes, bytes]) -> bool:
    has_body = b"transfer-encoding" in headers or _declared_length(headers) > 0
    return has_body and headers.get(b"expect", b"").lower() != b"100-continue"


class AdmissionGate:
    """Bounds what waits: sequences, or documents, of this server in flight, and the engine's own queue.

    The engine's statistics are a step old, so a burst is caught by the server's own count. With several owners one of
    them may hold half of the places, so that there is room for the others.
    """

    def __init__(
        self, *, max_in_flight: int, max_waiting: int, num_waiting: Callable[[], int], has_owners: bool = False
    ) -> None:
        self._max_in_flight = max_in_flight
        self._max_waiting = max_waiting
        self._num_waiting = num_waiting
        self._max_of_owner = max(max_in_flight // 2, 1) if has_owners else max_in_flight
        self._num_of_owner: Counter[str] = Counter()
        self.num_in_flight = 0

    def check(self, num_sequences: int, owner: str) -> None:
        """Raises `EngineError` (`queue_full`) where there are fewer places than `num_sequences`."""
        if self._num_of_owner[owner] + num_sequences > self._max_of_owner:
            raise EngineError("queue_full", "Too many of your requests are waiting. Try again when some are done.")
        if self.num_in_flight + num_sequences > self._max_in_flight or self._num_waiting() >= self._max_waiting:
            raise EngineError("queue_full", "Too many requests are waiting. Try again in a moment.")

    @contextlib.contextmanager
    def admit(self, num_sequences: int, owner: str) -> Iterator[None]:
        """Holds `num_sequences` places; raises `EngineError` (`queue_full`) where there are too few."""
        if num_sequences > self._max_of_owner:
            raise RequestError(
                "invalid_request",
                f"One request may ask for {self._max_of_owner} answers at most; this one asks for {num_sequences}.",
            )
        self.check(num_sequences, owner)
        self.num_in_flight += num_sequences
        self._num_of_owner[owner] += num_sequences
        try:
            yield
        finally:
            self.num_in_flight -= num_sequences
            self._num_of_owner -= Counter({owner: num_sequences})


@dataclass(frozen=True)
class _Route:
    """Stands for the route that a request would have come to: what is kept of it goes by its path."""

    path: str


class RefuseWhenFull:
    """Answers for a gate that is full before a body is read and looked at, which takes most of a refusal's time.

    `gates` maps paths to their gates, which the routes behind ask for places themselves.
    """

    def __init__(self, app: ASGIApp, *, gates: Mapping[str, AdmissionGate]) -> None:
        self.app = app
        self._gates = gates

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in self._gates:
            try:
                self._gates[scope["path"]].check(1, owner_of(scope))
            except EngineError as error:
                scope["route"] = _Route(scope["path"])
                await error_response(error)(scope, receive, send)
                return
        await self.app(scope, receive, send)
