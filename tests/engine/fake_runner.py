"""A runner without a model: it really writes to paged slots, so that a wrong block table gives wrong tokens.

What stands in a slot depends on the token, on all before it and on the images over it, as keys and values do; the next
token depends on all slots of the context, as attention does.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from engine_driver import check_invariants

from mmserve.config import CacheConfig, SchedulerConfig
from mmserve.engine.messages import TokenOutput
from mmserve.engine.scheduler import ScheduledBatch, ScheduledSequence, Scheduler
from mmserve.request import ImageSpan, SampledToken, SamplingParams
from mmserve.request import Sequence as EngineSequence

VOCAB_SIZE = 6
EOS = 0


class FakeRunner:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._slots = [b"never written"] * (num_blocks * block_size)
        self._sampled: dict[EngineSequence, int] = {}

    def run(self, batch: ScheduledBatch) -> dict[str, SampledToken]:
        for scheduled in batch.sequences:
            self._write(scheduled)
        self._sampled = {
            scheduled.sequence: self._next_token(scheduled) for scheduled in batch.sequences if scheduled.samples
        }
        return {sequence.request_id: SampledToken(token) for sequence, token in self._sampled.items()}

    def _write(self, scheduled: ScheduledSequence) -> None:
        sequence = scheduled.sequence
        for position in range(scheduled.start, scheduled.end):
            before = self._slots[self._slot(sequence, position - 1)] if position else b""
            is_pending = position >= sequence.num_tokens
            token_id = self._sampled[sequence] if is_pending else sequence.token_ids[position]
            self._slots[self._slot(sequence, position)] = content(before, token_id, position, sequence.images)

    def _next_token(self, scheduled: ScheduledSequence) -> int:
        return next_token(self._slots[self._slot(scheduled.sequence, i)] for i in range(scheduled.end))

    def _slot(self, sequence: EngineSequence, position: int) -> int:
        return sequence.block_ids[position // self._block_size] * self._block_size + position % self._block_size


def content(before: bytes, token_id: int, position: int, images: Sequence[ImageSpan]) -> bytes:
    digest = blake2b(before + bytes([token_id]), digest_size=8)
    for image in images:
        if image.offset <= position < image.offset + image.length:
            digest.update(image.content_hash + bytes([position - image.offset]))
    return digest.digest()


def next_token(contents: Iterable[bytes]) -> int:
    return blake2b(b"".join(contents), digest_size=1).digest()[0] % VOCAB_SIZE


def answer_alone(prompt: Sequence[int], images: Sequence[ImageSpan], num_tokens: int) -> list[int]:
    """`num_tokens` tokens that follow `prompt`, computed without any engine."""
    tokens, contents = list(prompt), [b""]
    while len(tokens) < len(prompt) + num_tokens:
        for position in range(len(contents) - 1, len(tokens)):
            contents.append(content(contents[-1], tokens[position], position, images))
        tokens.append(next_token(contents[1:]))
    return tokens[len(prompt) :]


def own_token(request_id: str) -> int:
    """What a prompt of `request_id` is made of that was given by its length alone."""
    return blake2b(request_id.encode(), digest_size=1).digest()[0]


class SchedulerDriver:
    """A `Scheduler` with a `FakeRunner`; invariants are checked after every step.

    With `steps_ahead`, so many batches are scheduled and run before the oldest is updated.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_model_len: int = 1000,
        prefix_caching: bool = True,
        eos_token_ids: tuple[int, ...] = (),
        steps_ahead: int = 0,
        **limits: int,
    ) -> None:
        self.now = 0.0
        self.scheduler = Scheduler(
            SchedulerConfig(**limits),
            CacheConfig(block_size=block_size, enable_prefix_caching=prefix_caching),
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids,
            clock=lambda: self.now,
        )
        self.runner = FakeRunner(num_blocks, block_size)
        self._steps_ahead = steps_ahead
        self._in_flight: deque[tuple[ScheduledBatch, dict[str, SampledToken]]] = deque()
        self.answers: dict[str, list[int]] = {}
        self.outputs: dict[str, TokenOutput] = {}

    def add(
        self,
        request_id: str,
        prompt: Sequence[int] | int,
        params: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        images: tuple[ImageSpan, ...] = (),
        cache_salt: bytes = b"",
    ) -> EngineSequence:
        """A prompt given as a number is that many of `own_token`."""
        tokens = list(prompt) if isinstance(prompt, Sequence) else [own_token(request_id)] * prompt
        params = params or SamplingParams(max_tokens=max_tokens)
        sequence = EngineSequence(
            request_id, tokens, params, images=images, arrival_time=self.now, cache_salt=cache_salt
        )
        self.scheduler.add(sequence)
        self.answers[request_id] = []
        return sequence

    def step(self) -> dict[str, int]:
        """One step -> how many tokens of which request were computed, in order."""
        batch = self.scheduler.schedule()
        assert batch.num_tokens <= self.scheduler.config.max_num_batched_tokens
        check_invariants(self.scheduler)
        can_wait = bool(self._in_flight)
        if batch.sequences:
            self._in_flight.append((batch, self.runner.run(batch)))
        if len(self._in_flight) > self._steps_ahead or not batch.sequences:
            self._update_oldest()
        check_invariants(self.scheduler)
        assert batch.num_tokens > 0 or can_wait or not self.scheduler.has_work
        return {scheduled.sequence.request_id: scheduled.num_scheduled_tokens for scheduled in batch.sequences}

    def _update_oldest(self) -> None:
        if not self._in_flight:
            return
        for output in self.scheduler.update(*self._in_flight.popleft()):
            self.answers[output.request_id] += output.token_ids
            self.outputs[output.request_id] = output

    def run(self, max_steps: int = 1000) -> list[dict[str, int]]:
        steps: list[dict[str, int]] = []
        while self.scheduler.has_work or self._in_flight:
            assert len(steps) < max_steps, "requests do not finish"
            steps.append(self.step())
        return steps

    def waiting(self) -> list[str]:
        return [sequence.request_id for sequence in self.scheduler.waiting]

    def running(self) -> list[str]:
        return [sequence.request_id for sequence in self.scheduler.running]

    def assert_nothing_is_owned(self) -> None:
        scheduler = self.scheduler
        check_invariants(scheduler)
        assert not scheduler.has_work
        assert scheduler.pool.num_referenced == 0
        assert not scheduler._by_id
        assert not scheduler._queue_seconds
