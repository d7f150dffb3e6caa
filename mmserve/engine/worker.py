"""The engine's own thread of control: take messages, step while there is work, send what came out."""

import gc
import logging
import queue
from collections.abc import Callable

from mmserve.config import EngineConfig
from mmserve.engine.engine import Engine
from mmserve.engine.messages import (
    AbortRequest,
    EngineFailed,
    EngineRequest,
    FromEngine,
    Ping,
    Pong,
    Shutdown,
    StepOutput,
    ToEngine,
    TokenOutput,
)
from mmserve.errors import SetupError, frames_of
from mmserve.vision.process_memory import is_out_of_memory

logger = logging.getLogger(__name__)

# In the time after which an engine that gives none counts as dead.
_SIGNS_OF_LIFE = 8
Inbox = queue.SimpleQueue[ToEngine]
Send = Callable[[FromEngine], None]


def run_engine(config: EngineConfig, inbox: Inbox, send: Send) -> None:
    """Load the engine, say that it is ready, and work until `Shutdown`. Whatever ends it early is sent as a failure."""
    try:
        engine = Engine(config)
        # The collector need not walk through what is loaded while tokens wait.
        gc.collect()
        gc.freeze()
        send(engine.ready_message)
        while _take_messages(engine, inbox, send, config.engine_timeout / _SIGNS_OF_LIFE):
            if engine.has_work:
                send(engine.step())
    except SetupError as error:
        send(EngineFailed(error.code, error.message))
    except Exception as error:
        if is_out_of_memory(error):
            send(EngineFailed("insufficient_memory", f"the engine ran out of memory: {_first_line(error)}"))
            return
        logger.error("the engine died\n%s", frames_of(error))
        send(EngineFailed("engine_dead", "the engine died of an internal error; its log says which"))
    finally:
        gc.unfreeze()


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0]


def _take_messages(engine: Engine, inbox: Inbox, send: Send, seconds: float) -> bool:
    """Handle all messages there are, waiting for one if there is nothing else to do. False at `Shutdown`.

    While it waits it gives a sign of life, an output of nothing, every so many `seconds`.
    """
    while True:
        try:
            message = inbox.get(block=not engine.has_work, timeout=seconds)
        except queue.Empty:
            if engine.has_work:
                return True
            send(StepOutput((), engine.scheduler.stats()))
            continue
        if isinstance(message, Shutdown):
            return False
        if isinstance(message, Ping):
            send(Pong(message.number))
            continue
        reply = _handle(engine, message)
        if reply is not None:
            send(StepOutput((reply,), engine.scheduler.stats()))


def _handle(engine: Engine, message: EngineRequest | AbortRequest) -> TokenOutput | None:
    if isinstance(message, EngineRequest):
        return engine.add_request(message)
    return engine.abort(message.request_id)
