"""Which sequences run next, and how many tokens of each. One rule: computed tokens catch up under a budget."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mmserve.cache.block_pool import BlockPool
from mmserve.cache.encoder_cache import EncoderCache
from mmserve.cache.prefix_cache import PrefixCache, block_hash
from mmserve.config import CacheConfig, SchedulerConfig
from mmserve.engine.image_planner import ImagePlanner
from mmserve.engine.messages import EngineStats, RequestFailure, TokenOutput, as_failure
from mmserve.engine.prefix_waiting import BlocksInProgress
from mmserve.errors import EngineError, RequestError
from mmserve.request import FinishReason, ImageSpan, SampledToken, Sequence, SequenceStatus


@dataclass(frozen=True)
class ScheduledSequence:
    """Tokens `start` up to `end` of a sequence; with `samples` they are its last, and the next one is to be chosen."""

    sequence: Sequence
    start: int
    end: int
    samples: bool

    @property
    def num_scheduled_tokens(self) -> int:
        return self.end - self.start

    @property
    def num_output_tokens(self) -> int:
        """Output tokens before the one that is to be chosen."""
        return self.end - len(self.sequence.prompt_token_ids)


@dataclass(frozen=True)
class ScheduledBatch:
    """`images` are to be encoded before the sequences run."""

    sequences: tuple[ScheduledSequence, ...] = ()
    images: tuple[ImageSpan, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(scheduled.num_scheduled_tokens for scheduled in self.sequences)


class Scheduler:
    """Owns the queues and the block accounting; never sees a tensor.

    A batch may be scheduled before the one before it is updated: what that one computes counts as computed, and the
    tokens that it samples as pending.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache_config: CacheConfig,
        *,
        num_blocks: int,
        max_model_len: int,
        eos_token_ids: tuple[int, ...] = (),
        encoder_cache: EncoderCache | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.block_size = cache_config.block_size
        self.max_model_len = min(max_model_len, num_blocks * self.block_size)
        self.prefix_cache = PrefixCache() if cache_config.enable_prefix_caching else None
        self.pool = BlockPool(num_blocks, on_evict=self._forget_block)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.in_progress = BlocksInProgress()
        self.images = ImagePlanner(
            encoder_cache or EncoderCache(config.encoder_cache_tokens), config.max_encoder_tokens
        )
        self._eos_token_ids = frozenset(eos_token_ids)
        self._by_id: dict[str, Sequence] = {}
        self._queue_seconds: dict[str, float] = {}
        self._clock = clock

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def stats(self) -> EngineStats:
        encoder_cache = self.images.cache
        return EngineStats(
            num_requests_running=len(self.running),
            num_requests_waiting=len(self.waiting),
            kv_cache_usage_ratio=self.pool.num_referenced / self.pool.num_blocks,
            prefix_cache_queries=self.prefix_cache.num_queried_tokens if self.prefix_cache is not None else 0,
            prefix_cache_hits=self.prefix_cache.num_hit_tokens if self.prefix_cache is not None else 0,
            num_preemptions=self.num_preemptions,
            encoder_cache_queries=encoder_cache.num_queries,
            encoder_cache_hits=encoder_cache.num_hits,
            num_encoder_runs=encoder_cache.work.num_runs,
            num_encoder_tokens=encoder_cache.work.num_tokens,
            encoder_seconds=encoder_cache.work.seconds,
        )

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence, or raise: `context_length_exceeded` for what can never fit, `queue_full`."""
        self._check_admission(sequence)
        self._by_id[sequence.request_id] = sequence
        self.waiting.append(sequence)

    def abort(self, request_id: str) -> bool:
        """Forget a sequence wherever it is; False if it is unknown (finished already)."""
        sequence = self._by_id.get(request_id)
        if sequence is None:
            return False
        self._finish(sequence)
        return True

    def give_up(self, batch: ScheduledBatch) -> list[str]:
        """Forget the sequences of the newest batch, which did not run; their ids."""
        lost = [scheduled.sequence for scheduled in batch.sequences]
        for sequence in lost:
            self._finish(sequence)
        return [sequence.request_id for sequence in lost]

    def schedule(self) -> ScheduledBatch:
        """The next batch: running sequences first, then waiting ones while budget, seats and blocks last."""
        scheduled: list[ScheduledSequence] = []
        budget = self.config.max_num_batched_tokens
        num_preemptions_before = self.num_preemptions
        self.images.start_step()
        for sequence in tuple(self.running):
            num_tokens = self._num_schedulable(sequence, budget)
            if num_tokens and self._make_room(sequence, num_tokens):
                scheduled.append(advance(sequence, num_tokens))
                budget -= num_tokens
        while budget and self.num_preemptions == num_preemptions_before and self._admit_next():
            sequence = self.running[-1]
            num_tokens = self._num_schedulable(sequence, budget)
            if num_tokens:
                self._allocate(sequence, num_tokens)
                scheduled.append(advance(sequence, num_tokens))
                budget -= num_tokens
        return ScheduledBatch(tuple(scheduled), self.images.planned())

    def update(
        self, batch: ScheduledBatch, sampled: Mapping[str, SampledToken], encoder_seconds: Callable[[], float] = float
    ) -> list[TokenOutput]:
        """Append what the oldest batch sampled, and finish what is done.

        `encoder_seconds` are those of its images; on a GPU they are known when a later token is.
        """
        outputs = []
        encoded = {image.content_hash for image in batch.images}
        for scheduled in batch.sequences:
            sequence = scheduled.sequence
            if sequence.status is SequenceStatus.FINISHED:
                continue
            if scheduled.samples:
                sequence.num_pending_tokens -= 1
                sequence.output_token_ids.append(sampled[sequence.request_id].token_id)
            if encoded and not encoded.isdisjoint(image.content_hash for image in sequence.images):
                sequence.encodings.append(encoder_seconds)
            self._publish_full_blocks(sequence)
            self.images.release_computed(sequence)
            if scheduled.samples:
                outputs.append(self._output(sequence, sampled[sequence.request_id]))
        return outputs

    def _check_admission(self, sequence: Sequence) -> None:
        self.images.check_admission(sequence, self.max_model_len)
        sequence.params.check_fits(len(sequence.prompt_token_ids), self.max_model_len)
        if len(self.waiting) >= self.config.max_num_waiting:
            raise EngineError("queue_full", f"{len(self.waiting)} requests are waiting already: try again later")
        if sequence.request_id in self._by_id:
            raise RequestError("invalid_request", f"request id {sequence.request_id!r} is in use", param="request_id")

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _num_schedulable(self, sequence: Sequence, budget: int) -> int:
        """Tokens that may run now: within the budget, and up to an image that has to wait for its encoding."""
        if sequence.status is not SequenceStatus.RUNNING or (
            sequence.num_pending_tokens and self._waits_for_pending(sequence)
        ):
            return 0
        num_known = sequence.num_tokens + sequence.num_pending_tokens
        num_tokens = min(num_known - sequence.num_computed_tokens, budget)
        return self.images.cut(sequence, num_tokens) if sequence.images else num_tokens

    def _waits_for_pending(self, sequence: Sequence) -> bool:
        """Whether the pending token is the last one, or the next choice depends on it."""
        params, num_pending = sequence.params, sequence.num_pending_tokens
        num_output_tokens = len(sequence.output_token_ids) + num_pending
        is_last = num_output_tokens == params.max_tokens or sequence.num_tokens + num_pending >= self.max_model_len
        return is_last or params.needs_last_token

    def _make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Blocks for the next `num_tokens` of a running sequence, preempting the newest ones as needed."""
        while not self._fits(sequence, num_tokens):
            newest = self.running[-1]
            self._preempt(newest)
            if newest is sequence:
                return False
        self._allocate(sequence, num_tokens)
        return True

    def _fits(self, sequence: Sequence, num_tokens: int) -> bool:
        needed = self._num_blocks(sequence.num_computed_tokens + num_tokens) - len(sequence.block_ids)
        return needed <= self.pool.num_available

    def _allocate(self, sequence: Sequence, num_tokens: int) -> None:
        needed = self._num_blocks(sequence.num_computed_tokens + num_tokens) - len(sequence.block_ids)
        sequence.block_ids += self.pool.allocate(max(needed, 0))

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        self.running.remove(sequence)
        self._release_blocks(sequence)
        sequence.status = SequenceStatus.WAITING
        self.waiting.appendleft(sequence)

    def _admit_next(self) -> bool:
        """Move a waiting sequence to the running ones, with its cached prefix, if seats and blocks suffice.

        It is the first of those that need not wait for a prefix that a running one is computing, or for its grammar.
        """
        if len(self.running) >= self.config.max_num_seqs:
            return False
        for sequence in self.waiting:
            if sequence.is_compiling or self.in_progress.is_waiting(sequence.request_id):
                continue
            self._take_cached_prefix(sequence)
            awaited = self._awaited_block(sequence)
            if awaited is None:
                return self._admit(sequence)
            self._release_blocks(sequence)
            self.in_progress.wait(sequence.request_id, awaited)
        return False

    def _admit(self, sequence: Sequence) -> bool:
        if not self._fits(sequence, sequence.num_tokens - sequence.num_computed_tokens):
            self._release_blocks(sequence)
            return False
        self.waiting.remove(sequence)
        self.running.append(sequence)
        sequence.status = SequenceStatus.RUNNING
        if self.prefix_cache is not None:
            missing = range(len(sequence.block_ids), len(sequence.prompt_token_ids) // self.block_size)
            self.in_progress.start(sequence.request_id, [self._block_content(sequence, i)[0] for i in missing])
        self._count_admission(sequence)
        return True

    def _awaited_block(self, sequence: Sequence) -> bytes | None:
        """The last of the blocks, next after the cached ones, that a running sequence is computing as well."""
        awaited = None
        if self.prefix_cache is not None:
            for i_block in range(len(sequence.block_ids), (sequence.num_tokens - 1) // self.block_size):
                content_hash = self._block_content(sequence, i_block)[0]
                if content_hash not in self.in_progress:
                    break
                awaited = content_hash
        return awaited

    def _count_admission(self, sequence: Sequence) -> None:
        """Bookkeeping of a first admission; one after preemption counts neither as waiting nor as a cache query."""
        if sequence.request_id in self._queue_seconds:
            return
        self._queue_seconds[sequence.request_id] = max(self._clock() - sequence.arrival_time, 0.0)
        sequence.num_cached_prompt_tokens = sequence.num_computed_tokens
        if self.prefix_cache is not None:
            self.prefix_cache.num_queried_tokens += len(sequence.prompt_token_ids)
            self.prefix_cache.num_hit_tokens += sequence.num_cached_prompt_tokens

    def _take_cached_prefix(self, sequence: Sequence) -> None:
        """Share the blocks of the longest cached prefix; the last token is always computed, for its logits."""
        if self.prefix_cache is None:
            return
        for i_block in range((sequence.num_tokens - 1) // self.block_size):
            content_hash, parent_hash, token_ids = self._block_content(sequence, i_block)
            block_id = self.prefix_cache.find(content_hash, parent_hash, token_ids)
            if block_id is None:
                return
            self.pool.share(block_id)
            sequence.block_ids.append(block_id)
            sequence.num_computed_tokens += self.block_size

    def _forget_block(self, block_id: int) -> None:
        if self.prefix_cache is not None:
            self.prefix_cache.evict(block_id)

    def _publish_full_blocks(self, sequence: Sequence) -> None:
        if self.prefix_cache is None:
            return
        for i_block in range(sequence.num_published_blocks, sequence.num_computed_tokens // self.block_size):
            content_hash, parent_hash, token_ids = self._block_content(sequence, i_block)
            block_id = sequence.block_ids[i_block]
            if self.prefix_cache.publish(content_hash, parent_hash, token_ids, block_id):
                self.pool.mark_cached(block_id)
            self.in_progress.finish(content_hash)
            sequence.num_published_blocks = i_block + 1

    def _block_content(self, sequence: Sequence, i_block: int) -> tuple[bytes, bytes, list[int]]:
        """Hash, parent hash and tokens of a full block; hashes are kept with the sequence."""
        start = i_block * self.block_size
        token_ids = sequence.tokens(start, start + self.block_size)
        hashes = sequence.block_hashes
        parent_hash = hashes[i_block - 1] if i_block else sequence.cache_salt
        if i_block == len(hashes):
            hashes.append(block_hash(parent_hash, token_ids, start, sequence.images))
        return hashes[i_block], parent_hash, token_ids

    def _output(self, sequence: Sequence, sampled: SampledToken) -> TokenOutput:
        if sequence.matcher is not None:
            try:
                sequence.matcher.accept(sampled.token_id)
            except RequestError as error:
                return self.refuse(sequence, as_failure(error))
        finish_reason, stop_token_id = self._finish_reason(sequence, sampled.token_id)
        output = TokenOutput(
            sequence.request_id,
            token_ids=(sampled.token_id,),
            logprobs=(sampled.logprob,) if sampled.logprob else (),
            finish_reason=finish_reason,
            stop_token_id=stop_token_id,
            num_cached_tokens=sequence.num_cached_prompt_tokens,
            queue_seconds=self._queue_seconds[sequence.request_id],
            encoder_seconds=sum(seconds() for seconds in sequence.encodings),
        )
        if finish_reason:
            self._finish(sequence)
        return output

    def refuse(self, sequence: Sequence, failure: RequestFailure) -> TokenOutput:
        """End a sequence that cannot go on; what is left to say of it."""
        self._finish(sequence)
        return TokenOutput(sequence.request_id, finish_reason="error", failure=failure)

    def _finish_reason(self, sequence: Sequence, token_id: int) -> tuple[FinishReason | None, int | None]:
        params, num_output_tokens = sequence.params, len(sequence.output_token_ids)
        if sequence.matcher is not None and sequence.matcher.is_complete:
            return "stop", token_id if token_id in self._eos_token_ids else None
        if num_output_tokens >= params.min_tokens:
            if token_id in self._eos_token_ids and not params.ignore_eos:
                return "stop", token_id
            if token_id in params.stop_token_ids:
                return "stop", token_id
        if num_output_tokens == params.max_tokens or sequence.num_tokens >= self.max_model_len:
            return "length", None
        return None, None

    def _finish(self, sequence: Sequence) -> None:
        (self.running if sequence.status is SequenceStatus.RUNNING else self.waiting).remove(sequence)
        self._release_blocks(sequence)
        sequence.status = SequenceStatus.FINISHED
        del self._by_id[sequence.request_id]
        self._queue_seconds.pop(sequence.request_id, None)

    def _release_blocks(self, sequence: Sequence) -> None:
        self.images.release_all(sequence)
        self.in_progress.give_up(sequence.request_id, sequence.block_hashes[sequence.num_published_blocks :])
        self.pool.free(sequence.block_ids)
        sequence.block_ids = []
        sequence.num_computed_tokens = 0
        sequence.num_published_blocks = 0


def advance(sequence: Sequence, num_tokens: int) -> ScheduledSequence:
    """The next `num_tokens` of a sequence, which from here on count as computed."""
    start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + num_tokens
    samples = end == sequence.num_tokens + sequence.num_pending_tokens
    sequence.num_computed_tokens = end
    sequence.num_pending_tokens += samples
    return ScheduledSequence(sequence, start, end, samples)
