"""Who owns each block: allocation, sharing, freeing, and the order of eviction."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mmserve.cache.block_pool import BlockPool


def make_pool(num_blocks: int) -> tuple[BlockPool, list[int]]:
    evicted: list[int] = []
    return BlockPool(num_blocks, on_evict=evicted.append), evicted


def test_allocates_each_block_once() -> None:
    pool, _ = make_pool(4)
    block_ids = pool.allocate(3)
    assert len(set(block_ids)) == 3
    assert pool.num_available == 1
    assert pool.num_referenced == 3
    assert all(pool.num_references(block_id) == 1 for block_id in block_ids)
    pool.check_invariants()


def test_allocating_nothing_gives_nothing() -> None:
    pool, _ = make_pool(2)
    assert pool.allocate(0) == []
    assert pool.num_available == 2


def test_asking_for_more_than_there_is_is_a_fault_of_the_caller() -> None:
    pool, _ = make_pool(2)
    pool.allocate(1)
    with pytest.raises(AssertionError):
        pool.allocate(2)
    assert pool.num_available == 1


def test_freeing_twice_is_a_fault_of_the_caller() -> None:
    pool, _ = make_pool(2)
    block_ids = pool.allocate(1)
    pool.free(block_ids)
    with pytest.raises(AssertionError):
        pool.free(block_ids)


def test_a_block_without_cached_content_cannot_be_shared() -> None:
    pool, _ = make_pool(2)
    (block_id,) = pool.allocate(1)
    with pytest.raises(AssertionError):
        pool.share(block_id)


def test_content_cannot_be_published_by_nobody() -> None:
    pool, _ = make_pool(2)
    with pytest.raises(AssertionError):
        pool.mark_cached(0)


def test_shared_block_is_available_only_after_the_last_owner() -> None:
    pool, _ = make_pool(1)
    (block_id,) = pool.allocate(1)
    pool.mark_cached(block_id)
    pool.share(block_id)
    pool.free([block_id])
    assert pool.num_references(block_id) == 1
    assert pool.num_available == 0
    pool.free([block_id])
    assert pool.num_available == 1
    pool.check_invariants()


def test_cached_content_stays_while_a_free_block_is_left() -> None:
    pool, evicted = make_pool(3)
    cached = pool.allocate(1)
    pool.mark_cached(cached[0])
    pool.free(cached)
    assert cached[0] not in pool.allocate(2)
    assert evicted == []
    assert pool.allocate(1) == cached
    assert evicted == cached


def test_least_recently_freed_content_goes_first() -> None:
    pool, evicted = make_pool(3)
    first, second, third = pool.allocate(3)
    for block_id in (first, second, third):
        pool.mark_cached(block_id)
    for block_id in (second, third, first):
        pool.free([block_id])
    pool.allocate(3)
    assert evicted == [second, third, first]


def test_a_hit_makes_content_recent_again() -> None:
    pool, evicted = make_pool(2)
    first, second = pool.allocate(2)
    for block_id in (first, second):
        pool.mark_cached(block_id)
        pool.free([block_id])
    pool.share(first)
    pool.free([first])
    pool.allocate(2)
    assert evicted == [second, first]


def test_the_head_of_a_prefix_is_evicted_last() -> None:
    """Its tail is of no use without it."""
    pool, evicted = make_pool(3)
    head, middle, tail = block_ids = pool.allocate(3)
    for block_id in block_ids:
        pool.mark_cached(block_id)
    pool.free(block_ids)
    pool.allocate(3)
    assert evicted == [tail, middle, head]


def test_evicted_content_is_forgotten() -> None:
    pool, evicted = make_pool(1)
    (block_id,) = pool.allocate(1)
    pool.mark_cached(block_id)
    pool.free([block_id])
    pool.free(pool.allocate(1))
    assert evicted == [block_id]
    with pytest.raises(AssertionError):
        pool.share(block_id)
    pool.allocate(1)
    assert evicted == [block_id]


class Owners(RuleBasedStateMachine):
    """Many owners take, publish, share and free at random; a model with plain lists says what must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(7, on_evict=self.on_evict)
        self.owners: list[list[int]] = []
        self.cached: set[int] = set()

    def on_evict(self, block_id: int) -> None:
        assert block_id in self.cached
        assert all(block_id not in blocks for blocks in self.owners)
        self.cached.remove(block_id)

    @rule(count=st.integers(0, 7))
    def allocate(self, count: int) -> None:
        if count <= self.pool.num_available:
            block_ids = self.pool.allocate(count)
            assert not self.cached & set(block_ids)
            self.owners.append(block_ids)

    @precondition(lambda self: any(self.owners))
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted({i for blocks in self.owners for i in blocks})))
        self.pool.mark_cached(block_id)
        self.cached.add(block_id)

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.cached)))
        self.pool.share(block_id)
        self.owners.append([block_id])

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.owners) - 1))
        self.pool.free(self.owners.pop(index))

    @invariant()
    def holds(self) -> None:
        self.pool.check_invariants()
        owned = [block_id for blocks in self.owners for block_id in blocks]
        assert all(self.pool.num_references(block_id) == owned.count(block_id) for block_id in range(7))
        assert self.pool.num_referenced == len(set(owned))
        assert self.pool.num_available == 7 - len(set(owned))


TestOwners = Owners.TestCase
TestOwners.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
