"""Image embeddings by content hash: reserved before they are computed, pinned while needed, evicted oldest first."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any


@dataclass
class EncoderEntry:
    """An image's embeddings, `[num_tokens, ...]`, or None while they are being computed."""

    num_tokens: int
    num_pins: int = 0
    embeddings: Any = None


@dataclass
class EncoderWork:
    """Running totals of what was encoded because it was not cached."""

    num_runs: int = 0
    num_tokens: int = 0
    seconds: float = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        self.num_runs += 1
        self.num_tokens += num_tokens
        self.seconds += seconds


class EncoderCache:
    """Bounded in tokens. An entry without pins stays until its room is needed."""

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.num_queries = 0
        self.num_hits = 0
        self.work = EncoderWork()
        self._entries: OrderedDict[bytes, EncoderEntry] = OrderedDict()
        self._unpinned: OrderedDict[bytes, None] = OrderedDict()
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of all entries, pinned or not."""
        return self._num_tokens

    def __contains__(self, content_hash: bytes) -> bool:
        return content_hash in self._entries

    def can_reserve(self, num_tokens: int) -> bool:
        evictable = sum(self._entries[content_hash].num_tokens for content_hash in self._unpinned)
        return self._num_tokens - evictable + num_tokens <= self.capacity_tokens

    def reserve(self, content_hash: bytes, num_tokens: int) -> None:
        """Room for embeddings that this step computes, with one pin; the oldest entries without pins make way."""
        assert content_hash not in self._entries
        assert self.can_reserve(num_tokens), "the caller checks can_reserve"
        while self._num_tokens + num_tokens > self.capacity_tokens:
            self._remove(next(iter(self._unpinned)))
        self._entries[content_hash] = EncoderEntry(num_tokens, num_pins=1)
        self._num_tokens += num_tokens

    def pin(self, content_hash: bytes) -> None:
        self._entries[content_hash].num_pins += 1
        self._unpinned.pop(content_hash, None)

    def release(self, content_hash: bytes) -> None:
        """Drop one pin. An entry that was never filled (its step did not run) is forgotten with its last pin."""
        entry = self._entries[content_hash]
        assert entry.num_pins > 0
        entry.num_pins -= 1
        if entry.num_pins == 0:
            self._unpinned[content_hash] = None
            if entry.embeddings is None:
                self._remove(content_hash)

    def put(self, content_hash: bytes, embeddings: Any) -> None:
        entry = self._entries[content_hash]
        assert len(embeddings) == entry.num_tokens, "the encoder gives as many rows as the prompt has placeholders"
        entry.embeddings = embeddings

    def get(self, content_hash: bytes) -> Any:
        embeddings = self._entries[content_hash].embeddings
        assert embeddings is not None, "a pinned entry is filled before it is read"
        return embeddings

    def num_pins(self, content_hash: bytes) -> int:
        return self._entries[content_hash].num_pins

    def check_invariants(self) -> None:
        assert self._num_tokens == sum(entry.num_tokens for entry in self._entries.values()) <= self.capacity_tokens
        assert set(self._unpinned) == {key for key, entry in self._entries.items() if entry.num_pins == 0}

    def _remove(self, content_hash: bytes) -> None:
        del self._unpinned[content_hash]
        self._num_tokens -= self._entries.pop(content_hash).num_tokens
