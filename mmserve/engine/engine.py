"""The loop's one step: schedule, run, update."""

import logging
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, wait

from mmserve.cache.encoder_cache import EncoderCache
from mmserve.config import EngineConfig
from mmserve.engine.messages import EngineReady, EngineRequest, RequestFailure, StepOutput, TokenOutput, as_failure
from mmserve.engine.model_runner import ModelRunner, PendingStep, choose_device
from mmserve.engine.sampler import check_token_ids
from mmserve.engine.scheduler import ScheduledBatch, Scheduler
from mmserve.engine.structured import GrammarCompiler, Matcher
from mmserve.errors import EngineError, MMServeError, RequestError
from mmserve.request import Sequence
from mmserve.weights.checkpoint import open_checkpoint

logger = logging.getLogger(__name__)

# How long a step with nothing to do waits for a grammar: new requests are looked at after that.
_IDLE_SECONDS = 0.005


class Engine:
    """Sequences in, tokens out. Not thread-safe: one thread calls everything."""

    def __init__(self, config: EngineConfig) -> None:
        """Load and warm up. Raises `SetupError`."""
        checkpoint = open_checkpoint(
            config.model,
            load_format=config.load_format,
            quantization=config.quantization,
            seed=config.seed,
            device=choose_device(config.device),
        )
        encoder_cache = EncoderCache(config.scheduler.encoder_cache_tokens)
        self._runner = ModelRunner(config, checkpoint, encoder_cache)
        self._runner.warm_up()
        self._vocab_size = self._runner.model_config.vocab_size
        self._in_flight: deque[tuple[ScheduledBatch, PendingStep]] = deque()
        eos_token_ids = self._runner.model_config.eos_token_ids
        self._grammars = GrammarCompiler(checkpoint.tokenizer, self._vocab_size, eos_token_ids)
        self._compiling: dict[str, tuple[Sequence, Future[Matcher]]] = {}
        self.scheduler = Scheduler(
            config.scheduler,
            config.cache,
            num_blocks=self._runner.kv_cache.num_blocks,
            max_model_len=self._runner.max_model_len,
            eos_token_ids=eos_token_ids,
            encoder_cache=encoder_cache,
        )

    @property
    def ready_message(self) -> EngineReady:
        return EngineReady(
            max_model_len=self._runner.max_model_len,
            num_blocks=self._runner.kv_cache.num_blocks,
            device=str(self._runner.device),
            dtype=str(self._runner.dtype).removeprefix("torch."),
        )

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight) or self.scheduler.has_work

    def add_request(self, request: EngineRequest) -> TokenOutput | None:
        """Queue a request. One that is refused gets its answer at once: an output that carries the failure."""
        try:
            self._check(request)
            sequence = _sequence(request)
            self.scheduler.add(sequence)
        except MMServeError as error:
            return TokenOutput(request.request_id, finish_reason="error", failure=as_failure(error))
        if request.params.structured is not None:
            self._compiling[request.request_id] = sequence, self._grammars.submit(request.params.structured)
        return None

    def abort(self, request_id: str) -> TokenOutput | None:
        """Free everything that a request holds; None if it is not known any more."""
        if (compiling := self._compiling.pop(request_id, None)) is not None:
            compiling[1].cancel()
        return TokenOutput(request_id, finish_reason="abort") if self.scheduler.abort(request_id) else None

    def step(self) -> StepOutput:
        """Launch a batch, and take the results of the oldest in flight; on a GPU that is the one before.

        There is nothing of both where all that may run sent itself back for want of blocks: the next step goes on. A
        batch that the runner refuses ends with an error for its own requests.
        """
        outputs = self._take_compiled()
        batch = self.scheduler.schedule()
        if batch.sequences:
            try:
                self._in_flight.append((batch, self._runner.run(batch)))
            except EngineError as error:
                outputs += self._give_up(batch, error)
                batch = ScheduledBatch()
        if len(self._in_flight) > (self._runner.num_steps_ahead if batch.sequences else 0):
            finished, step = self._in_flight.popleft()
            outputs += self.scheduler.update(finished, step.take(), step.encoder_seconds)
        return StepOutput(tuple(outputs), self.scheduler.stats())

    def _give_up(self, batch: ScheduledBatch, error: EngineError) -> list[TokenOutput]:
        request_ids = self.scheduler.give_up(batch)
        logger.error("%d requests failed: %s", len(request_ids), error)
        failure = as_failure(error)
        return [TokenOutput(request_id, finish_reason="error", failure=failure) for request_id in request_ids]

    def _take_compiled(self) -> list[TokenOutput]:
        """Let sequences run whose grammar is compiled; what is said to those whose grammar cannot be."""
        if not self._compiling:
            return []
        scheduler = self.scheduler
        if not (self._in_flight or scheduler.running) and len(scheduler.waiting) == len(self._compiling):
            wait([future for _, future in self._compiling.values()], _IDLE_SECONDS, FIRST_COMPLETED)
        refused = []
        for request_id, (sequence, future) in tuple(self._compiling.items()):
            if future.done():
                del self._compiling[request_id]
                error = future.exception()
                if error is None:
                    sequence.matcher = future.result()
                else:
                    refused.append(scheduler.refuse(sequence, _compile_failure(error)))
        return refused

    def _check(self, request: EngineRequest) -> None:
        if not request.prompt_token_ids:
            raise RequestError("invalid_request", "the prompt is empty", param="prompt")
        if min(request.prompt_token_ids) < 0 or max(request.prompt_token_ids) >= self._vocab_size:
            last = self._vocab_size - 1
            raise RequestError("invalid_request", f"prompt token ids must be between 0 and {last}", param="prompt")
        if request.images and not self._runner.reads_images:
            raise RequestError(
                "invalid_request",
                "this model reads text only: leave the images out, or serve a vision-language model",
                param="messages",
            )
        check_token_ids(request.params, self._vocab_size)


def _compile_failure(error: BaseException) -> RequestFailure:
    if isinstance(error, MMServeError):
        return as_failure(error)
    logger.error("a grammar could not be compiled", exc_info=error)
    return RequestFailure("internal_error", "what the answer has to look like could not be compiled")


def _sequence(request: EngineRequest) -> Sequence:
    return Sequence(
        request.request_id,
        request.prompt_token_ids,
        request.params,
        seed=request.seed,
        images=request.images,
        arrival_time=request.arrival_time,
        cache_salt=request.cache_salt,
    )
