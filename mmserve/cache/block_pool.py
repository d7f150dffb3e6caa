"""Who owns each KV block: allocation, sharing, freeing, eviction. Knows ids only, no tensors."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable


class BlockPool:
    """`num_blocks` blocks, each free, referenced, or kept for its cached content and evictable, least recent first."""

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None]) -> None:
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._free: deque[int] = deque(range(num_blocks))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._cached: set[int] = set()
        self._num_references = [0] * num_blocks

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return len(self._free) + len(self._evictable)

    @property
    def num_referenced(self) -> int:
        return self.num_blocks - self.num_available

    def num_references(self, block_id: int) -> int:
        return self._num_references[block_id]

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each; cached content is evicted only when no free block is left."""
        assert count <= self.num_available, "the caller checks num_available"
        block_ids = [self._free.popleft() if self._free else self._evict() for _ in range(count)]
        for block_id in block_ids:
            self._num_references[block_id] = 1
        return block_ids

    def share(self, block_id: int) -> None:
        """Take one more reference to a block with cached content."""
        assert block_id in self._cached
        self._evictable.pop(block_id, None)
        self._num_references[block_id] += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Drop one reference each; the last block goes first, so that the head of a prefix is evicted last."""
        for block_id in reversed(list(block_ids)):
            assert self._num_references[block_id] > 0
            self._num_references[block_id] -= 1
            if self._num_references[block_id] == 0:
                if block_id in self._cached:
                    self._evictable[block_id] = None
                else:
                    self._free.append(block_id)

    def mark_cached(self, block_id: int) -> None:
        """The content of this referenced block is published: keep it when the references are gone."""
        assert self._num_references[block_id] > 0
        self._cached.add(block_id)

    def check_invariants(self) -> None:
        """Free, evictable and referenced blocks partition the pool."""
        free, evictable = set(self._free), set(self._evictable)
        referenced = {i for i, count in enumerate(self._num_references) if count > 0}
        assert len(free) == len(self._free), "a block is in the free list twice"
        assert not free & evictable
        assert not (free | evictable) & referenced
        assert free | evictable | referenced == set(range(self.num_blocks))
        assert evictable <= self._cached
        assert not free & self._cached

    def _evict(self) -> int:
        block_id, _ = self._evictable.popitem(last=False)
        self._cached.remove(block_id)
        self._on_evict(block_id)
        return block_id
