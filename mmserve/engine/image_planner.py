"""Which images a step encodes: those that a chunk reaches into, within the encoder's budget; others cut the chunk."""

from mmserve.cache.encoder_cache import EncoderCache
from mmserve.errors import RequestError
from mmserve.request import ImageSpan, Sequence


class ImagePlanner:
    """Keeps the pins: an image stays from the step that encodes it until its last token is computed."""

    def __init__(self, cache: EncoderCache, budget_tokens: int) -> None:
        self.cache = cache
        self._budget_tokens = budget_tokens
        self._num_planned_tokens = 0
        self._is_full = False
        self._to_encode: list[ImageSpan] = []
        self._pinned: dict[str, set[bytes]] = {}

    def check_admission(self, sequence: Sequence, max_model_len: int) -> None:
        """Raises `RequestError` for an image that no step could ever hold."""
        largest = max((image.length for image in sequence.images), default=0)
        if largest >= max_model_len:
            raise RequestError(
                "context_length_exceeded",
                f"an image takes {largest} tokens, but the context holds {max_model_len}:"
                " lower max_pixels, or start with a larger --max-model-len",
                param="max_pixels",
            )
        if largest > self.cache.capacity_tokens:
            raise RequestError(
                "context_length_exceeded",
                f"an image takes {largest} tokens, but the encoder cache holds {self.cache.capacity_tokens}:"
                " lower max_pixels, or start with a larger --encoder-cache-tokens",
                param="max_pixels",
            )

    def start_step(self) -> None:
        self._num_planned_tokens = 0
        self._is_full = False
        self._to_encode = []

    def planned(self) -> tuple[ImageSpan, ...]:
        """The images that this step encodes; one whose sequence was preempted since is none of them."""
        return tuple(image for image in self._to_encode if image.content_hash in self.cache)

    def cut(self, sequence: Sequence, num_tokens: int) -> int:
        """How many of the next `num_tokens` can run: all up to the first image that is neither cached nor plannable."""
        start = sequence.num_computed_tokens
        for image in sequence.images if num_tokens else ():
            if image.offset >= start + num_tokens:
                break
            if image.end > start and not self._obtain(sequence, image):
                return max(image.offset - start, 0)
        return num_tokens

    def release_computed(self, sequence: Sequence) -> None:
        """Unpin all but an image that the computed tokens end inside.

        One that stands in the prompt again further on goes too: kept, it could bar the way to what stands between.
        """
        pinned = self._pinned.get(sequence.request_id)
        if not pinned:
            return
        num_computed = sequence.num_computed_tokens
        needed = {image.content_hash for image in sequence.images if image.offset < num_computed < image.end}
        self._release(sequence.request_id, pinned - needed)

    def release_all(self, sequence: Sequence) -> None:
        self._release(sequence.request_id, set(self._pinned.get(sequence.request_id, ())))

    def check_invariants(self, running: list[Sequence]) -> None:
        """Only running sequences pin, and every pin has an owner."""
        self.cache.check_invariants()
        assert set(self._pinned) <= {sequence.request_id for sequence in running}
        for content_hash in {key for pinned in self._pinned.values() for key in pinned}:
            owners = sum(content_hash in pinned for pinned in self._pinned.values())
            assert self.cache.num_pins(content_hash) == owners

    def _obtain(self, sequence: Sequence, image: ImageSpan) -> bool:
        """Pin the image for the sequence, planning to encode it if it is not cached; False if that has to wait."""
        pinned = self._pinned.setdefault(sequence.request_id, set())
        if image.content_hash in pinned:
            return True
        self.cache.num_queries += 1
        if image.content_hash in self.cache:
            self.cache.num_hits += 1
            self.cache.pin(image.content_hash)
        elif self._has_room(image):
            self.cache.reserve(image.content_hash, image.length)
            self._num_planned_tokens += image.length
            self._to_encode.append(image)
        else:
            self.cache.num_queries -= 1
            if not pinned:
                del self._pinned[sequence.request_id]
            return False
        pinned.add(image.content_hash)
        return True

    def _has_room(self, image: ImageSpan) -> bool:
        """Within the step's budget, which one image may exceed alone, and the cache's capacity.

        After one image found no room, none has: later sequences' small ones must not starve an earlier, larger one.
        """
        is_alone = not self._to_encode
        within_budget = is_alone or self._num_planned_tokens + image.length <= self._budget_tokens
        self._is_full = self._is_full or not within_budget or not self.cache.can_reserve(image.length)
        return not self._is_full

    def _release(self, request_id: str, content_hashes: set[bytes]) -> None:
        pinned = self._pinned.get(request_id, set())
        for content_hash in content_hashes:
            self.cache.release(content_hash)
            pinned.remove(content_hash)
        if not pinned:
            self._pinned.pop(request_id, None)
