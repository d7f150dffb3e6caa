"""A name for every request: the client's own or one of ours, in the answer's header, in logs and in engine ids."""

import re
import uuid
from contextvars import ContextVar

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "X-Request-Id"
# Short, and nothing that could break a line of a log or of a header.
_SANE = re.compile(rb"[A-Za-z0-9._-]{1,128}")

# None outside of a request.
REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)


class RequestIds:
    """Outermost: sets `REQUEST_ID` for all that a request does, its tasks among it, and sends the id back."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = _sent(scope) or f"req-{uuid.uuid4().hex}"

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        token = REQUEST_ID.set(request_id)
        try:
            await self.app(scope, receive, send_with_id)
        finally:
            REQUEST_ID.reset(token)


def _sent(scope: Scope) -> str | None:
    """The client's id, if it sent one that can stand anywhere."""
    values = [value for name, value in scope["headers"] if name.lower() == HEADER.lower().encode()]
    if len(values) != 1 or not _SANE.fullmatch(values[0]):
        return None
    sent: str = values[0].decode("ascii")
    return sent
