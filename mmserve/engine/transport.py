"""How messages travel to the engine and back: inside one process, or over a pipe to a process of its own."""

import atexit
import contextlib
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Protocol

from mmserve.config import EngineConfig
from mmserve.engine.messages import EngineFailed, FromEngine, Shutdown, ToEngine

_JOIN_SECONDS = 10.0
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
OnMessage = Callable[[FromEngine], None]


class Transport(Protocol):
    def send(self, message: ToEngine) -> None:
        """Never blocks for long and never raises: a dead engine has already announced itself."""

    def close(self) -> None:
        """Stop the engine and wait for it."""


class ThreadTransport:
    """The engine runs in a daemon thread of this process."""

    def __init__(self, config: EngineConfig, on_message: OnMessage) -> None:
        self._inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(config, on_message), name="engine", daemon=True)
        self._thread.start()

    def send(self, message: ToEngine) -> None:
        self._inbox.put(message)

    def close(self) -> None:
        self._inbox.put(Shutdown())
        self._thread.join(_JOIN_SECONDS)

    def _run(self, config: EngineConfig, on_message: OnMessage) -> None:
        # Imported here so that a front end whose engine is another process loads no model code.
        from mmserve.engine.worker import run_engine

        run_engine(config, self._inbox, on_message)


class ProcessTransport:
    """The engine is a child process; if it dies, however, `EngineFailed` is delivered at once."""

    def __init__(self, config: EngineConfig, on_message: OnMessage) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child_end = context.Pipe()
        self._lock = threading.Lock()
        self._process = context.Process(target=_child_main, args=(config, child_end), name="engine", daemon=True)
        with _signals_blocked():
            self._process.start()
        # The child ignores SIGTERM, which is how multiprocessing ends a child that was left running.
        atexit.register(self._process.kill)
        child_end.close()
        self._reader = threading.Thread(target=self._read, args=(on_message,), name="engine-reader", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def send(self, message: ToEngine) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._pipe.send(message)

    def close(self) -> None:
        self.send(Shutdown())
        self._process.join(_JOIN_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._reader.join(_JOIN_SECONDS)
        self._pipe.close()
        atexit.unregister(self._process.kill)

    def _read(self, on_message: OnMessage) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                on_message(self._pipe.recv())
        self._process.join(_JOIN_SECONDS)
        on_message(EngineFailed("engine_dead", f"the engine process ended (exit code {self._process.exitcode})"))


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """A child that starts in this block inherits the mask: it is not stopped before it has said what it ignores."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _child_main(config: EngineConfig, pipe: Connection) -> None:
    # The front end decides when to stop: a signal to the whole group must not cut the requests that it is draining.
    for kind in _STOP_SIGNALS:
        signal.signal(kind, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
    from mmserve.engine.worker import run_engine

    inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
    threading.Thread(target=_fill_inbox, args=(pipe, inbox), daemon=True).start()
    run_engine(config, inbox, pipe.send)


def _fill_inbox(pipe: Connection, inbox: queue.SimpleQueue[ToEngine]) -> None:
    try:
        while True:
            inbox.put(pipe.recv())
    except (EOFError, OSError):
        # The front end is gone: nobody is left to answer to.
        os._exit(1)
