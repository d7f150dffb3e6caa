"""The front end's side of the engine: token ids in, text deltas out, whatever thread or process the engine is in."""

import asyncio
import itertools
import logging
import operator
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Literal

from mmserve.config import EngineConfig, ModelConfig
from mmserve.engine.completion import (
    AnswerBuilder,
    Completion,
    CompletionDelta,
    RequestTimings,
    as_exception,
    merge_deltas,
)
from mmserve.engine.mailbox import Mailbox
from mmserve.engine.messages import (
    AbortRequest,
    EngineFailed,
    EngineReady,
    EngineRequest,
    EngineStats,
    FromEngine,
    LogLine,
    Ping,
    Pong,
    RequestFailure,
    StepOutput,
    TokenOutput,
)
from mmserve.engine.restarts import RestartPolicy
from mmserve.engine.transport import ProcessTransport, ThreadTransport, Transport
from mmserve.errors import MMServeError, RequestError
from mmserve.request import ImageSpan, SamplingParams
from mmserve.vision.image_plan import ImageProcessor
from mmserve.vision.preprocess import load_processor
from mmserve.weights.checkpoint import open_checkpoint
from mmserve.weights.tokenizer import Tokenizer

__all__ = ["Completion", "CompletionDelta", "EngineClient", "RequestTimings"]

logger = logging.getLogger(__name__)


class EngineClient:
    """One engine. `generate` may be called from any event loop, `abort` from any thread.

    `image_processor` is None for a model that reads text only.

    A process that dies once it was ready is started again, `config.max_engine_restarts` times in ten minutes at most.
    What it worked on ends with `engine_dead`; requests that come meanwhile wait, as they do while it loads at first.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        model_config: ModelConfig,
        image_processor: ImageProcessor | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.model_config = model_config
        self.image_processor = image_processor
        self.max_model_len = config.max_model_len or model_config.max_context
        self.stats = EngineStats()
        self.observers: list[Callable[[RequestTimings], None]] = []
        self.engine_info: EngineReady | None = None
        self.num_restarts = 0
        self._failure: EngineFailed | None = None
        self._settled = threading.Event()
        self._lock = threading.Lock()
        self._requests: dict[str, Mailbox] = {}
        self._mailboxes: dict[str, Mailbox] = {}
        self._settling: dict[int, Future[None]] = {}
        self._serial_numbers = itertools.count()
        self._policy = RestartPolicy(config.max_engine_restarts if config.use_process else 0)
        self._was_ready = False
        kind = ProcessTransport if config.use_process else ThreadTransport
        self.transport: Transport = kind(config, partial(self._on_message, self.num_restarts))

    @classmethod
    def start(cls, config: EngineConfig) -> "EngineClient":
        """Find the model, read its tokenizer, start the engine; it loads while this returns. Raises `SetupError`."""
        checkpoint = open_checkpoint(
            config.model, load_format=config.load_format, quantization=config.quantization, seed=config.seed
        )
        model_config = ModelConfig.from_hf(checkpoint.config, checkpoint.generation_config)
        tokenizer = checkpoint.tokenizer()
        return cls(config, tokenizer, model_config, load_processor(checkpoint, tokenizer))

    @property
    def state(self) -> Literal["starting", "ready", "dead"]:
        if self._failure is not None:
            return "dead"
        return "ready" if self.engine_info is not None else "starting"

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Block until the engine is loaded and warm. Raises `SetupError` or `EngineError` if it cannot be."""
        if not self._settled.wait(timeout):
            raise as_exception(RequestFailure("timeout", f"the engine was not ready within {timeout} seconds"))
        self._raise_if_dead()

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        images: Sequence[ImageSpan] = (),
        cache_salt: bytes = b"",
    ) -> AsyncGenerator[CompletionDelta, None]:
        """Deltas of all `params.n` answers, interleaved. Leaving the iterator aborts what is unfinished.

        The patches of `images` have to stay in shared memory until then. What is computed for the prompt is shared with
        requests of the same `cache_salt` alone.

        Raises `RequestError` for what the engine refuses, `EngineError` if it dies.
        """
        self._raise_if_dead()
        token_ids = _as_token_ids(prompt_token_ids)
        request_id = request_id or uuid.uuid4().hex
        builders = {
            child_id: AnswerBuilder(index, len(token_ids), params, self.tokenizer)
            for index, child_id in enumerate(self._child_ids(request_id, params.n))
        }
        mailbox = Mailbox(request_id, asyncio.get_running_loop(), builders, self._close)
        self._open(list(builders), mailbox)
        try:
            # The engine would say the same, after it has read all of them once for each answer.
            params.check_fits(len(token_ids), self.max_model_len)
            self._submit(mailbox.transport, list(builders), token_ids, params, tuple(images), cache_salt)
            while mailbox.has_more:
                for delta in await mailbox.take():
                    yield delta
        except MMServeError:
            for builder in builders.values():
                builder.fail()
            raise
        finally:
            for child_id in list(mailbox.open_ids):
                self._close(child_id, True)
            for builder in builders.values():
                self._observe(builder.timings())

    async def complete(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        images: Sequence[ImageSpan] = (),
    ) -> list[Completion]:
        """All `params.n` answers, whole, in order."""
        stream = self.generate(prompt_token_ids, params, request_id=request_id, images=images)
        deltas = [delta async for delta in stream]
        return [merge_deltas([delta for delta in deltas if delta.index == index]) for index in range(params.n)]

    def abort(self, request_id: str) -> None:
        """End a request; whoever reads its answer gets `finish_reason="abort"`."""
        with self._lock:
            mailbox = self._requests.get(request_id)
            child_ids = list(mailbox.open_ids) if mailbox else []
        if mailbox is not None:
            for child_id in child_ids:
                mailbox.transport.send(AbortRequest(child_id))

    def settle(self) -> Future[None]:
        """Done when all that was asked of the engine so far, aborts among it, has taken effect; or the engine is dead.

        Only then is what an aborted request pointed to, such as an image's patches, not looked at any more.
        """
        settled: Future[None] = Future()
        # From here on nobody can cancel it, and whoever tells that it is done cannot fail.
        settled.set_running_or_notify_cancel()
        with self._lock:
            transport = self.transport
            if self._failure is None:
                number = next(self._serial_numbers)
                self._settling[number] = settled
            else:
                settled.set_result(None)
        if not settled.done():
            transport.send(Ping(number))
        return settled

    def close(self) -> None:
        """Stop the engine; requests in flight end with `shutting_down`."""
        self._end(EngineFailed("shutting_down", "the engine is shutting down"))
        self.transport.close()

    def _child_ids(self, request_id: str, count: int) -> list[str]:
        """Ids that the engine has never seen, so that a request cannot get what belongs to an earlier one."""
        return [f"{request_id}/{next(self._serial_numbers)}" for _ in range(count)]

    def _open(self, child_ids: list[str], mailbox: "Mailbox") -> None:
        with self._lock:
            if mailbox.request_id in self._requests:
                raise RequestError("invalid_request", "this request id is in use", param="request_id")
            mailbox.transport = self.transport
            self._requests[mailbox.request_id] = mailbox
            mailbox.open_ids.update(child_ids)
            self._mailboxes.update(dict.fromkeys(child_ids, mailbox))
        if self._failure is not None:
            mailbox.fail(as_exception(RequestFailure(self._failure.code, self._failure.message)))

    @staticmethod
    def _submit(
        transport: Transport,
        child_ids: list[str],
        prompt_token_ids: list[int],
        params: SamplingParams,
        images: tuple[ImageSpan, ...],
        cache_salt: bytes,
    ) -> None:
        seed = uuid.uuid4().int & (2**63 - 1) if params.seed is None else params.seed
        for index, child_id in enumerate(child_ids):
            request = EngineRequest(
                child_id, prompt_token_ids, params, seed + index, images, time.monotonic(), cache_salt
            )
            transport.send(request)

    def _close(self, child_id: str, aborts: bool) -> None:
        with self._lock:
            mailbox = self._mailboxes.pop(child_id)
            mailbox.open_ids.remove(child_id)
            if not mailbox.open_ids:
                del self._requests[mailbox.request_id]
        if aborts and self._failure is None:
            mailbox.transport.send(AbortRequest(child_id))

    def _observe(self, timings: RequestTimings) -> None:
        for observer in self.observers:
            observer(timings)

    def _raise_if_dead(self) -> None:
        if self._failure is not None:
            raise as_exception(RequestFailure(self._failure.code, self._failure.message))

    def _on_message(self, life: int, message: FromEngine) -> None:
        """Runs in the transport's thread; `life` says which engine speaks: the first, or that after a restart."""
        if life != self.num_restarts:
            return
        if isinstance(message, LogLine):
            logging.getLogger(message.logger).log(message.level, message.message)
        elif isinstance(message, StepOutput):
            self.stats = message.stats
            self._deliver(message.outputs)
        elif isinstance(message, EngineReady):
            self._welcome(message)
        elif isinstance(message, Pong):
            with self._lock:
                settled = self._settling.pop(message.number, None)
            if settled is not None:
                settled.set_result(None)
        else:
            self._lose(message)

    def _welcome(self, ready: EngineReady) -> None:
        with self._lock:
            if self._failure is not None:
                return
            self.engine_info = ready
            self.max_model_len = ready.max_model_len
            self._was_ready = True
            self._settled.set()
        if self.num_restarts:
            logger.warning("the engine is ready again")

    def _deliver(self, outputs: Sequence[TokenOutput]) -> None:
        """One wake-up a loop for all outputs of a step."""
        by_loop: defaultdict[asyncio.AbstractEventLoop, list[tuple[Mailbox, TokenOutput]]] = defaultdict(list)
        with self._lock:
            for output in outputs:
                mailbox = self._mailboxes.get(output.request_id)
                if mailbox is not None:
                    by_loop[mailbox.loop].append((mailbox, output))
        for loop, items in by_loop.items():
            _call_in_loop(loop, partial(_put_all, items))

    def _lose(self, failure: EngineFailed) -> None:
        """The engine has died: start another one if it ever ran, and the policy allows it."""
        with self._lock:
            # What was never ready cannot be: whoever started it should hear of it at once.
            delay = self._policy.next_delay() if self._was_ready and self._failure is None else None
        if delay is None:
            if self._was_ready and self._failure is None:
                logger.error("%s; it is not started again", failure.message)
            self._end(failure)
        else:
            logger.error("%s; it is started again in %g seconds", failure.message, delay)
            self._end(replace(failure, code="engine_dead"), delay)

    def _end(self, failure: EngineFailed, restart_delay: float | None = None) -> None:
        """Nothing that is open will be answered any more. Without a delay the engine stays dead."""
        with self._lock:
            if self._failure is not None:
                return
            if restart_delay is None:
                self._failure = failure
                self._settled.set()
            else:
                self._succeed(restart_delay)
            mailboxes = set(self._mailboxes.values())
            settling, self._settling = self._settling, {}
        # What it worked on died with it; its running totals stay true.
        self.stats = self.stats._replace(num_requests_running=0, num_requests_waiting=0, kv_cache_usage_ratio=0.0)
        for settled in settling.values():
            settled.set_result(None)
        for mailbox in mailboxes:
            error = as_exception(RequestFailure(failure.code, failure.message))
            _call_in_loop(mailbox.loop, partial(mailbox.fail, error))

    def _succeed(self, delay_seconds: float) -> None:
        """Another engine in this one's place, under the lock: what is opened from now on is for the new one."""
        self.num_restarts += 1
        self.engine_info = None
        self._settled.clear()
        on_message = partial(self._on_message, self.num_restarts)
        self.transport = ProcessTransport(
            self.config, on_message, predecessor=self.transport, delay_seconds=delay_seconds
        )


def _put_all(items: Sequence[tuple[Mailbox, TokenOutput]]) -> None:
    for mailbox, output in items:
        mailbox.put(output)


def _as_token_ids(values: Sequence[int]) -> list[int]:
    try:
        return list(map(operator.index, values))
    except TypeError:
        raise RequestError("invalid_request", "a prompt must be a list of token ids", param="prompt") from None


def _call_in_loop(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        # The reader's loop is closed: there is nobody left to tell.
        return
