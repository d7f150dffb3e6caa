"""A server on a real socket, in a thread of the test's process."""

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from mmserve.server.app import create_app
from mmserve.server.runner import DrainingServer, bind
from mmserve.server.settings import ServerSettings


class LiveServer:
    def __init__(self, app: FastAPI, settings: ServerSettings) -> None:
        self.app = app
        self.socket = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.server = DrainingServer(app, settings)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]})

    def start(self) -> None:
        self.thread.start()
        wait_until(lambda: self.server.started)

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(timeout=20)
        assert not self.thread.is_alive()


@contextmanager
def serving(
    engine: Any,
    *,
    reader: Any = None,
    prompts: Any = None,
    tracing: Any = None,
    middleware: Any = None,
    **settings: Any,
) -> Iterator[LiveServer]:
    """With files and jobs in a folder of its own, unless `settings` name one."""
    with tempfile.TemporaryDirectory(prefix="mmserve-data-") as folder:
        chosen = ServerSettings(**{"shutdown_timeout": 0.2, "data_dir": Path(folder), **settings})
        app = create_app(engine, reader, chosen, prompts, tracing)
        if middleware is not None:
            app.add_middleware(middleware)
        server = LiveServer(app, chosen)
        server.start()
        try:
            yield server
        finally:
            server.stop()


def wait_until(condition: Callable[[], Any], *, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.005)
