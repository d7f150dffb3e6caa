"""The loop's one step: schedule, run, update."""

import logging
from collections import deque

from mmserve.cache.encoder_cache import EncoderCache
from mmserve.config import EngineConfig
from mmserve.engine.messages import EngineReady, EngineRequest, RequestFailure, StepOutput, TokenOutput
from mmserve.engine.model_runner import ModelRunner, PendingStep, choose_device
from mmserve.engine.sampler import check_token_ids
from mmserve.engine.scheduler import ScheduledBatch, Scheduler
from mmserve.errors import EngineError, MMServeError, RequestError
from mmserve.request import Sequence
from mmserve.weights.checkpoint import Checkpoint, open_checkpoint

logger = logging.getLogger(__name__)


class Engine:
    """Sequences in, tokens out. Not thread-safe: one thread calls everything."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint | None = None) -> None:
        """Load and warm up. Raises `SetupError`."""
        checkpoint = checkpoint or open_checkpoint(
            config.model, load_format=config.load_format, seed=config.seed, device=choose_device(config.device)
        )
        encoder_cache = EncoderCache(config.scheduler.encoder_cache_tokens)
        self._runner = ModelRunner(config, checkpoint, encoder_cache)
        self._runner.warm_up()
        self._vocab_size = self._runner.model_config.vocab_size
        self._in_flight: deque[tuple[ScheduledBatch, PendingStep]] = deque()
        self.scheduler = Scheduler(
            config.scheduler,
            config.cache,
            num_blocks=self._runner.kv_cache.num_blocks,
            max_model_len=self._runner.max_model_len,
            eos_token_ids=self._runner.model_config.eos_token_ids,
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
            self.scheduler.add(_sequence(request))
        except MMServeError as error:
            failure = RequestFailure(error.code, error.message, error.param)
            return TokenOutput(request.request_id, finish_reason="error", failure=failure)
        return None

    def abort(self, request_id: str) -> TokenOutput | None:
        """Free everything that a request holds; None if it is not known any more."""
        return TokenOutput(request_id, finish_reason="abort") if self.scheduler.abort(request_id) else None

    def step(self) -> StepOutput:
        """Launch a batch, and take the results of the oldest in flight; on a GPU that is the one before.

        There is nothing of both where all that may run sent itself back for want of blocks: the next step goes on. A
        batch that the runner refuses ends with an error for its own requests.
        """
        batch = self.scheduler.schedule()
        outputs: list[TokenOutput] = []
        if batch.sequences:
            try:
                self._in_flight.append((batch, self._runner.run(batch)))
            except EngineError as error:
                outputs, batch = self._give_up(batch, error), ScheduledBatch()
        if len(self._in_flight) > (self._runner.num_steps_ahead if batch.sequences else 0):
            finished, step = self._in_flight.popleft()
            outputs += self.scheduler.update(finished, step.take(), step.encoder_seconds)
        return StepOutput(tuple(outputs), self.scheduler.stats())

    def _give_up(self, batch: ScheduledBatch, error: EngineError) -> list[TokenOutput]:
        request_ids = self.scheduler.give_up(batch)
        logger.error("%d requests failed: %s", len(request_ids), error)
        failure = RequestFailure(error.code, error.message)
        return [TokenOutput(request_id, finish_reason="error", failure=failure) for request_id in request_ids]

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
