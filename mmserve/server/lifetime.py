"""When a request's work must end early: its client left, its time is over, or the server stops."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from mmserve.errors import EngineError
from mmserve.pipelines.concurrency import end_all

Result = TypeVar("Result")


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""


class Drain:
    """The server's end: from `begin` on it takes no requests, and after the grace time it ends those that still run."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.is_over = asyncio.Event()

    @property
    def has_begun(self) -> bool:
        return self.begun.is_set()

    def begin(self, grace_seconds: float) -> None:
        if not self.has_begun:
            self.begun.set()
            asyncio.get_running_loop().call_later(grace_seconds, self.is_over.set)


async def run_within_lifetime(
    work: Coroutine[Any, Any, Result], *, receive: Receive, drain: Drain, timeout: float | None
) -> Result:
    """Awaits `work` while its client is there; otherwise cancels it, which aborts it in the engine.

    Raises `ClientGone`, or `EngineError` with `timeout` or `shutting_down`. The body must have been read before.
    """
    task = asyncio.ensure_future(work)
    client_left = asyncio.ensure_future(_disconnected(receive))
    server_stops = asyncio.ensure_future(drain.is_over.wait())
    everything: list[asyncio.Future[Any]] = [task, client_left, server_stops]
    try:
        done, _ = await asyncio.wait(everything, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if task in done:
            return task.result()
        raise _early_end(client_left in done, server_stops in done)
    finally:
        await end_all(everything)


def _early_end(client_left: bool, server_stops: bool) -> Exception:
    if client_left:
        return ClientGone()
    if server_stops:
        return EngineError(
            "shutting_down", "The server stopped before the answer was complete. Send the request again."
        )
    return EngineError("timeout", "The request took longer than this server allows. Ask for fewer tokens or pages.")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
