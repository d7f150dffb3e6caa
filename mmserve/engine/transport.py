"""How messages travel to the engine and back: inside one process, or over a pipe to a process of its own."""

import atexit
import contextlib
import logging
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Protocol

from mmserve.config import EngineConfig
from mmserve.engine.messages import EngineFailed, EngineReady, FromEngine, LogLine, Shutdown, ToEngine

_JOIN_SECONDS = 10.0
_WAITS = 4
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
OnMessage = Callable[[FromEngine], None]


class Transport(Protocol):
    def send(self, message: ToEngine) -> None:
        """Never blocks and never raises: a dead engine has already announced itself."""

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
    """The engine is a child process; if it dies, however, `EngineFailed` is delivered at once. One that was ready and
    has said nothing for `config.engine_timeout` is killed.

    With a `predecessor` it takes that one's place: the process starts `delay_seconds` after the other has ended, and
    what is sent before that waits for it.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_message: OnMessage,
        *,
        predecessor: Transport | None = None,
        delay_seconds: float = 0.0,
    ) -> None:
        self._config = config
        self._on_message = on_message
        self._lock = threading.Lock()
        # The pipe holds little: who sends does not wait until a busy engine has read it.
        self._outbox: queue.SimpleQueue[ToEngine | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="engine-writer", daemon=True)
        self._pipe: Connection | None = None
        self._process: SpawnProcess | None = None
        self._is_closed = threading.Event()
        if predecessor is None:
            self._start()
        main = partial(self._succeed, predecessor, delay_seconds)
        self._reader = threading.Thread(target=main, name="engine-reader", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def send(self, message: ToEngine) -> None:
        self._outbox.put(message)

    def close(self) -> None:
        with self._lock:
            self._is_closed.set()
        if self._process is not None:
            self.send(Shutdown())
            self._outbox.put(None)
            self._process.join(_JOIN_SECONDS)
            self._kill()
            self._writer.join(_JOIN_SECONDS)
        self._reader.join(_JOIN_SECONDS)
        if self._pipe is not None:
            self._pipe.close()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        pipe, child_end = context.Pipe()
        arguments = (self._config, child_end, logging.getLogger("mmserve").getEffectiveLevel())
        process = context.Process(target=_child_main, args=arguments, name="engine", daemon=True)
        with _signals_blocked():
            process.start()
        # The child ignores SIGTERM, which is how multiprocessing ends a child that was left running.
        atexit.register(process.kill)
        child_end.close()
        self._pipe, self._process = pipe, process
        self._writer.start()

    def _succeed(self, predecessor: Transport | None, delay_seconds: float) -> None:
        """The reader thread: start, if that is still to be done, and read until the process has ended."""
        try:
            if predecessor is not None:
                # Memory for two engines may not be there.
                predecessor.close()
                self._is_closed.wait(delay_seconds)
                with self._lock:
                    if self._is_closed.is_set():
                        return
                    self._start()
        except OSError as error:
            self._on_message(EngineFailed("engine_dead", f"the engine process could not be started: {error}"))
            return
        self._read()

    def _write(self) -> None:
        """The writer thread."""
        assert self._pipe is not None
        while (message := self._outbox.get()) is not None:
            with contextlib.suppress(OSError):
                self._pipe.send(message)

    def _read(self) -> None:
        assert self._pipe is not None
        assert self._process is not None
        is_ready = is_silent = False
        with contextlib.suppress(EOFError, OSError):
            # Loading takes as long as it takes.
            while not is_ready or not (is_silent := self._is_silent()):
                message = self._pipe.recv()
                is_ready = is_ready or isinstance(message, EngineReady)
                self._on_message(message)
        if is_silent:
            self._process.kill()
        self._process.join(_JOIN_SECONDS)
        seconds = self._config.engine_timeout
        end = (
            f"gave no sign of life for {seconds:g} seconds and was killed"
            if is_silent
            else _how_it_ended(self._process.exitcode)
        )
        self._on_message(EngineFailed("engine_dead", f"the engine process {end}"))

    def _is_silent(self) -> bool:
        """Waits for a message, in parts: a server that is stopped itself and goes on has not waited for all of them."""
        assert self._pipe is not None
        seconds = self._config.engine_timeout / _WAITS
        return not any(self._pipe.poll(seconds) for _ in range(_WAITS))

    def _kill(self) -> None:
        """For good: nothing is left of the process."""
        assert self._process is not None
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        atexit.unregister(self._process.kill)


def _how_it_ended(exit_code: int | None) -> str:
    if exit_code == -signal.SIGKILL:
        return f"was killed (exit code {exit_code}): by hand, or by the system because memory ran out"
    return f"ended (exit code {exit_code})"


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """A child that starts in this block inherits the mask: it is not stopped before it has said what it ignores."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


class _LogToFrontEnd(logging.Handler):
    """Lines go where all lines go, in their form. Its lock keeps them from running into one another."""

    def __init__(self, send: OnMessage) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            self._send(LogLine(record.levelno, record.name, record.getMessage()))


def _child_main(config: EngineConfig, pipe: Connection, log_level: int) -> None:
    # The front end decides when to stop: a signal to the whole group must not cut the requests that it is draining.
    for kind in _STOP_SIGNALS:
        signal.signal(kind, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
    from mmserve.engine.worker import run_engine

    inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
    threading.Thread(target=_fill_inbox, args=(pipe, inbox), daemon=True).start()
    sending = threading.Lock()

    def send(message: FromEngine) -> None:
        with sending:
            pipe.send(message)

    log = logging.getLogger("mmserve")
    log.setLevel(log_level)
    log.propagate = False
    log.addHandler(_LogToFrontEnd(send))
    run_engine(config, inbox, send)


def _fill_inbox(pipe: Connection, inbox: queue.SimpleQueue[ToEngine]) -> None:
    try:
        while True:
            inbox.put(pipe.recv())
    except (EOFError, OSError):
        # The front end is gone: nobody is left to answer to.
        os._exit(1)
