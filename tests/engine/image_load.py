"""A `Scheduler` with images and no model: the encoder cache is filled, and read by every scheduled image token."""

from engine_driver import check_invariants

from mmserve.config import CacheConfig, SchedulerConfig
from mmserve.engine.scheduler import ScheduledBatch, Scheduler
from mmserve.request import ImageSpan, SampledToken, SamplingParams, Sequence

# Text, or an image: its name and its number of tokens.
Piece = int | tuple[str, int]


def sequence_of(request_id: str, pieces: list[Piece], *, max_tokens: int = 2) -> Sequence:
    """A number is that many tokens of text."""
    images: list[ImageSpan] = []
    token = 0
    for piece in pieces:
        if isinstance(piece, int):
            token += piece
        else:
            images.append(ImageSpan(token, piece[1], f"{piece[0]}{piece[1]}".encode()))
            token = images[-1].end
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Sequence(request_id, [1] * token, params, images=tuple(images))


class ImageLoad:
    """Steps a scheduler, and checks after each what must hold of images."""

    def __init__(
        self, *, num_blocks: int = 64, block_size: int = 4, prefix_caching: bool = True, **limits: int
    ) -> None:
        self.scheduler = Scheduler(
            SchedulerConfig(**limits),
            CacheConfig(block_size=block_size, enable_prefix_caching=prefix_caching),
            num_blocks=num_blocks,
            max_model_len=num_blocks * block_size,
        )
        self.encoded: list[bytes] = []
        self.num_idle_steps = 0

    def add(self, request_id: str, pieces: list[Piece], *, max_tokens: int = 2) -> Sequence:
        sequence = sequence_of(request_id, pieces, max_tokens=max_tokens)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> dict[str, int]:
        """How many tokens of which request ran."""
        batch = self.scheduler.schedule()
        check_invariants(self.scheduler)
        self._check_budgets(batch)
        self._encode(batch)
        self._read_embeddings(batch)
        self._check_pins_of_what_is_under_way(batch)
        sampled = {s.sequence.request_id: SampledToken(1) for s in batch.sequences if s.samples}
        self.scheduler.update(batch, sampled)
        check_invariants(self.scheduler)
        is_idle = not batch.sequences and self.scheduler.has_work
        self.num_idle_steps = self.num_idle_steps + 1 if is_idle else 0
        assert self.num_idle_steps <= 1, "two steps without a token"
        return {s.sequence.request_id: s.num_scheduled_tokens for s in batch.sequences}

    def run(self) -> list[dict[str, int]]:
        steps = []
        while self.scheduler.has_work:
            steps.append(self.step())
            assert len(steps) < 2000, "requests do not finish"
        assert not self.scheduler.images._pinned
        assert self.scheduler.pool.num_referenced == 0
        return steps

    def _check_budgets(self, batch: ScheduledBatch) -> None:
        config = self.scheduler.config
        assert batch.num_tokens <= config.max_num_batched_tokens
        keys = [image.content_hash for image in batch.images]
        assert len(set(keys)) == len(keys), "an image is encoded twice in one step"
        num_image_tokens = sum(image.length for image in batch.images)
        assert len(keys) <= 1 or num_image_tokens <= config.max_encoder_tokens
        assert self.scheduler.images.cache.num_tokens <= config.encoder_cache_tokens

    def _encode(self, batch: ScheduledBatch) -> None:
        for image in batch.images:
            self.encoded.append(image.content_hash)
            self.scheduler.images.cache.put(image.content_hash, [image.content_hash] * image.length)

    def _read_embeddings(self, batch: ScheduledBatch) -> None:
        for scheduled in batch.sequences:
            for image in scheduled.sequence.images:
                for position in range(max(image.offset, scheduled.start), min(image.end, scheduled.end)):
                    row = self.scheduler.images.cache.get(image.content_hash)[position - image.offset]
                    assert row == image.content_hash

    def _check_pins_of_what_is_under_way(self, batch: ScheduledBatch) -> None:
        """Nothing is pinned that no running sequence is inside of, or enters in this step."""
        chunks = {s.sequence.request_id: s.num_scheduled_tokens for s in batch.sequences}
        needed = set()
        for sequence in self.scheduler.running:
            stop = sequence.num_computed_tokens
            start = stop - chunks.get(sequence.request_id, 0)
            needed |= {i.content_hash for i in sequence.images if i.offset < stop and i.end > start}
        pinned = {key for keys in self.scheduler.images._pinned.values() for key in keys}
        assert pinned <= needed
