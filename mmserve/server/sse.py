"""Server-sent events: frames, and a response that ends early or in an error as it should."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mmserve.errors import MMServeError
from mmserve.pipelines.concurrency import end_all
from mmserve.server.errors import as_mmserve_error, envelope, error_response
from mmserve.server.lifetime import ClientGone, Drain, run_within_lifetime

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 15.0
HEARTBEAT_FRAME = ": still here\n\n"
DONE_FRAME = "data: [DONE]\n\n"


def frame(data: BaseModel | dict[str, Any], *, event: str | None = None, number: int | None = None) -> str:
    """One event; with a `number` a client can ask for what comes after it.

    JSON keeps line ends out of the payload, so that one `data:` line always holds it.
    """
    if isinstance(data, BaseModel):
        text = data.model_dump_json(exclude_unset=True)
    else:
        text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    place = "" if number is None else f"id: {number}\n"
    name = "" if event is None else f"event: {event}\n"
    return f"{place}{name}data: {text}\n\n"


async def with_heartbeats(
    frames: AsyncGenerator[str, None], *, until: asyncio.Event | None = None
) -> AsyncGenerator[str, None]:
    """`frames`, and after the first of them a comment wherever nothing comes for a while: proxies cut what is silent.

    It ends when `until` is set.
    """
    ending = asyncio.ensure_future((until or asyncio.Event()).wait())
    coming: asyncio.Future[str] | None = None
    silence: float | None = None
    try:
        while not ending.done():
            coming = coming or asyncio.ensure_future(anext(frames))
            await asyncio.wait((coming, ending), timeout=silence, return_when=asyncio.FIRST_COMPLETED)
            if coming.done():
                text, coming = coming.result(), None
                yield text
            elif not ending.done():
                yield HEARTBEAT_FRAME
            silence = HEARTBEAT_SECONDS
    except StopAsyncIteration:
        return
    finally:
        await end_all([ending] if coming is None else [ending, coming])
        await frames.aclose()


class EventStream(Response):
    """Sends `frames` as they come. The status waits for the first frame: what fails before it is an ordinary error.

    What fails later is a frame with the error's envelope, and the end. A client that leaves closes `frames`.
    `on_end` runs in every case.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncGenerator[str, None],
        *,
        drain: Drain,
        timeout: float | None,
        error_event: str | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._frames = frames
        self._drain = drain
        self._timeout = timeout
        self._error_event = error_event
        self._on_end = on_end
        self._has_started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_within_lifetime(
                self._send_frames(send), receive=receive, drain=self._drain, timeout=self._timeout
            )
        except ClientGone:
            logger.info("client left during %r", scope["path"])
        except Exception as error:
            await self._send_error(as_mmserve_error(error), scope, receive, send)
        finally:
            self._on_end()

    async def _send_frames(self, send: Send) -> None:
        async with aclosing(self._frames):
            async for text in self._frames:
                await self._start(send)
                await _send_body(send, text, more=True)
        await self._start(send)
        await _send_body(send, "", more=False)

    async def _start(self, send: Send) -> None:
        if not self._has_started:
            self._has_started = True
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

    async def _send_error(self, error: MMServeError, scope: Scope, receive: Receive, send: Send) -> None:
        if self._has_started:
            await _send_body(send, frame(envelope(error), event=self._error_event), more=False)
        else:
            await error_response(error)(scope, receive, send)


async def _send_body(send: Send, text: str, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": more})
