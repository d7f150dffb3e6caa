import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mmserve.cache.encoder_cache import EncoderCache

A, B, C = b"a", b"b", b"c"


def cache_of(*entries: tuple[bytes, int], capacity: int = 10) -> EncoderCache:
    """Filled entries without pins, oldest first."""
    cache = EncoderCache(capacity)
    for key, num_tokens in entries:
        cache.reserve(key, num_tokens)
        cache.put(key, [key] * num_tokens)
        cache.release(key)
    return cache


def test_an_entry_without_pins_stays_until_its_room_is_needed() -> None:
    cache = cache_of((A, 4), (B, 4))
    assert A in cache
    assert B in cache
    assert cache.num_tokens == 8
    cache.reserve(C, 2)
    assert A in cache
    cache.check_invariants()


def test_the_oldest_goes_first_and_no_more_than_needed() -> None:
    cache = cache_of((A, 4), (B, 4))
    cache.reserve(C, 5)
    assert A not in cache
    assert B in cache
    assert cache.num_tokens == 9


def test_age_counts_from_the_last_release() -> None:
    cache = cache_of((A, 4), (B, 4))
    cache.pin(A)
    cache.release(A)
    cache.reserve(C, 5)
    assert A in cache
    assert B not in cache


def test_pinned_entries_are_never_evicted() -> None:
    cache = cache_of((A, 4), (B, 4))
    cache.pin(A)
    assert cache.can_reserve(6)
    assert not cache.can_reserve(7)
    cache.reserve(C, 6)
    assert cache.get(A) == [A] * 4
    assert B not in cache


def test_every_pin_has_to_be_released() -> None:
    cache = EncoderCache(4)
    cache.reserve(A, 4)
    cache.put(A, [1, 2, 3, 4])
    cache.pin(A)
    cache.release(A)
    assert not cache.can_reserve(1)
    cache.release(A)
    assert cache.can_reserve(4)


def test_an_entry_that_was_never_filled_is_forgotten() -> None:
    cache = EncoderCache(4)
    cache.reserve(A, 4)
    cache.release(A)
    assert A not in cache
    assert cache.num_tokens == 0
    cache.check_invariants()


def test_rows_and_placeholders_have_to_agree() -> None:
    cache = EncoderCache(4)
    cache.reserve(A, 3)
    with pytest.raises(AssertionError, match="placeholders"):
        cache.put(A, [1, 2])


def test_reading_before_filling_is_an_error() -> None:
    cache = EncoderCache(4)
    cache.reserve(A, 3)
    with pytest.raises(AssertionError):
        cache.get(A)


class RandomUse(RuleBasedStateMachine):
    """Against a plain dictionary of pins: nothing pinned is lost, nothing exceeds the capacity."""

    @initialize(capacity=st.integers(1, 12))
    def start(self, capacity: int) -> None:
        self.cache = EncoderCache(capacity)
        self.pins: dict[bytes, int] = {}

    @rule(key=st.sampled_from([A, B, C, b"d", b"e"]), num_tokens=st.integers(1, 6), fills=st.booleans())
    def use(self, key: bytes, num_tokens: int, fills: bool) -> None:
        if key in self.cache:
            self.cache.pin(key)
        elif self.cache.can_reserve(num_tokens):
            self.cache.reserve(key, num_tokens)
            if fills:
                self.cache.put(key, [key] * num_tokens)
        else:
            return
        self.pins[key] = self.pins.get(key, 0) + 1

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.pins)))
        self.cache.release(key)
        self.pins[key] -= 1
        if not self.pins[key]:
            del self.pins[key]

    @invariant()
    def holds(self) -> None:
        self.cache.check_invariants()
        for key, count in self.pins.items():
            assert self.cache.num_pins(key) == count


TestRandomUse = RandomUse.TestCase
TestRandomUse.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
