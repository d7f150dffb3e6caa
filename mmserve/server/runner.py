"""uvicorn with a drain: on SIGTERM or SIGINT it takes nothing new, lets running requests finish, and then ends."""

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI

from mmserve.errors import RequestError
from mmserve.server.app import create_app
from mmserve.server.settings import ServerSettings
from mmserve.server.state import ServerState

if TYPE_CHECKING:
    from mmserve.engine.client import EngineClient
    from mmserve.engine.prompt_builder import PromptBuilder
    from mmserve.vision.pages import PageReader

# Beyond the drain's own end, so that requests end with an answer before uvicorn cancels them.
MARGIN_SECONDS = 5
POLL_SECONDS = 0.05


class DrainingServer(uvicorn.Server):
    """Runs `app` until a signal or `should_exit`. `received_signal` says which signal ended it, if one did.

    Jobs are worked on meanwhile. Those that run at the end are left for the next start.
    """

    def __init__(self, app: FastAPI, settings: ServerSettings) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            # Ours says the same by route, without what a query may hold.
            access_log=False,
            timeout_graceful_shutdown=int(settings.shutdown_timeout) + MARGIN_SECONDS,
            server_header=False,
        )
        super().__init__(config)
        self._state: ServerState = app.state.server
        self._grace_seconds = settings.shutdown_timeout
        self.received_signal: int | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Raises `StorageError` or `SetupError` where files and jobs cannot be kept."""
        async with self._state.jobs:
            await super().serve(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing: uvicorn would raise the signal again, and so end the process early. See `signals_stop`."""
        yield

    @contextlib.contextmanager
    def signals_stop(self) -> Iterator[None]:
        """SIGTERM and SIGINT start the drain inside this block (main thread only); a second SIGINT cuts it short."""
        kinds = (signal.SIGTERM, signal.SIGINT)
        previous = {kind: signal.signal(kind, self.handle_exit) for kind in kinds}
        try:
            yield
        finally:
            for kind, handler in previous.items():
                signal.signal(kind, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.received_signal = self.received_signal or sig
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._state.drain.begin(self._grace_seconds)
        await super().shutdown(sockets)


def run_server(
    engine: "EngineClient",
    reader: "PageReader",
    prompts: "PromptBuilder",
    settings: ServerSettings,
    listener: socket.socket,
    *,
    say: Callable[[str], None],
) -> int | None:
    """Serves until a signal, and returns it; main thread only. `say` gets a sentence for whoever started the server.

    Raises what the engine or the database of jobs could not start for. The reader is closed at the end, the rest is the
    caller's.
    """
    server = DrainingServer(create_app(engine, reader, settings, prompts), settings)
    with server.signals_stop():
        say(f"Listening on {url_of(listener)} (docs at {url_of(listener)}/docs); the model is being loaded.")
        asyncio.run(_serve(server, engine, reader, listener, say))
    if server.received_signal is None:
        engine.wait_until_ready(timeout=0)
    return server.received_signal


async def _serve(
    server: DrainingServer,
    engine: "EngineClient",
    reader: "PageReader",
    listener: socket.socket,
    say: Callable[[str], None],
) -> None:
    async with reader:
        loading = asyncio.create_task(_follow_loading(server, engine, say))
        await server.serve(sockets=[listener])
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)


async def _follow_loading(server: DrainingServer, engine: "EngineClient", say: Callable[[str], None]) -> None:
    """Ends the server where the engine cannot start; asks now and then, so that a signal need not wait for loading."""
    started = time.monotonic()
    while engine.state == "starting":  # noqa: ASYNC110
        await asyncio.sleep(POLL_SECONDS)
    if engine.state == "ready":
        say(f"Ready after {time.monotonic() - started:.1f} s.")
    else:
        server.should_exit = True


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 chooses a free one. Raises `RequestError` where the address cannot be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server((address[0], port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise RequestError(
            "invalid_request",
            f"Cannot listen on {host}:{port}: {reason}. Choose another --host or --port.",
            param="port",
        ) from None


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
