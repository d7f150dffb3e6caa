"""The CPU's attention backend: how it groups rows, and what comes out of a mixed step."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.attention.base import AttentionBatch, AttentionLayer
from mmserve.attention.context import ForwardContext
from mmserve.attention.torch_backend import CpuAttentionMetadata, DecodeGroup, TorchAttention

BLOCK_SIZE = 4
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
CPU = torch.device("cpu")


def backend() -> TorchAttention:
    return TorchAttention(num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, block_size=BLOCK_SIZE, dtype=torch.float32)


def decode_batch(context_lens: list[int]) -> AttentionBatch:
    tables, first = [], 0
    for length in context_lens:
        num_blocks = -(-length // BLOCK_SIZE)
        tables.append(list(range(first, first + num_blocks)))
        first += num_blocks
    return AttentionBatch([1] * len(context_lens), context_lens, tables)


def group_lens(context_lens: list[int]) -> list[list[int]]:
    metadata = backend().prepare(decode_batch(context_lens))
    return [context_lens[group.rows] for group in metadata.decodes]


@pytest.mark.parametrize(
    ("context_lens", "groups"),
    [
        ([7], [[7]]),
        ([8, 8, 8], [[8, 8, 8]]),
        ([8, 5, 4], [[8, 5, 4]]),
        ([8, 5, 3], [[8, 5], [3]]),
        ([100, 50, 49, 25, 24, 1], [[100, 50], [49, 25], [24], [1]]),
        ([], []),
    ],
    ids=str,
)
def test_a_group_ends_where_a_context_is_below_half_of_its_longest(
    context_lens: list[int], groups: list[list[int]]
) -> None:
    assert group_lens(context_lens) == groups


@given(st.lists(st.integers(1, 300), max_size=20))
@settings(max_examples=50, deadline=None)
def test_groups_cover_every_row_once_and_pad_less_than_they_hold(context_lens: list[int]) -> None:
    ordered = sorted(context_lens, reverse=True)
    groups = group_lens(ordered)
    assert [length for group in groups for length in group] == ordered
    for group in groups:
        assert 2 * sum(group) >= max(group) * len(group)


def test_chunks_come_after_single_queries() -> None:
    metadata = backend().prepare(AttentionBatch([1, 1, 3, 2], [9, 5, 7, 2], [[1, 2, 3], [4, 5], [6, 7], [8]]))
    assert [(group.rows.start, group.rows.stop) for group in metadata.decodes] == [(0, 2)]
    assert [(chunk.rows.start, chunk.rows.stop) for chunk in metadata.chunks] == [(2, 5), (5, 7)]
    later, first = metadata.chunks
    assert later.kv_rows is not None
    assert _blocks(later.kv_rows) == [[6, 7]]
    assert (later.context_len, first.context_len) == (7, 2)
    assert first.kv_rows is None


def _blocks(kv_rows: torch.Tensor) -> list[list[int]]:
    """Block ids from where the first head's K is gathered."""
    blocks: list[list[int]] = (kv_rows[0, :, 0] // (2 * KV_HEADS)).tolist()
    return blocks


def only_group(metadata: CpuAttentionMetadata) -> DecodeGroup:
    (group,) = metadata.decodes
    assert isinstance(group, DecodeGroup)
    return group


def test_padding_is_a_block_of_the_sequence_itself() -> None:
    metadata = backend().prepare(AttentionBatch([1, 1], [8, 4], [[5, 6], [7]]))
    assert _blocks(only_group(metadata).kv_rows) == [[5, 6], [7, 7]]


def test_single_queries_after_chunks_are_a_fault_of_the_caller() -> None:
    with pytest.raises(AssertionError, match="single queries come first"):
        backend().prepare(AttentionBatch([3, 1], [3, 5], [[0], [1, 2]]))


def test_a_table_may_be_longer_than_the_context() -> None:
    """Blocks can be allocated ahead of the tokens."""
    metadata = backend().prepare(AttentionBatch([1, 2], [4, 6], [[3, 9], [5, 6, 7]]))
    assert _blocks(only_group(metadata).kv_rows) == [[3]]
    kv_rows = metadata.chunks[0].kv_rows
    assert kv_rows is not None
    assert _blocks(kv_rows) == [[5, 6]]


class Step:
    """Random sequences of a step: `(context, queries)` each, with all but the queries already in the cache."""

    def __init__(self, shapes: list[tuple[int, int]], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        tables, num_blocks = [], 1
        for context_len, _ in shapes:
            count = -(-context_len // BLOCK_SIZE)
            tables.append(list(range(num_blocks, num_blocks + count))[::-1])
            num_blocks += count
        self.cache = torch.randn(num_blocks, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM, generator=generator)
        self.batch = AttentionBatch([queries for _, queries in shapes], [context for context, _ in shapes], tables)
        num_rows = sum(self.batch.query_lens)
        self.q = torch.randn(num_rows, HEADS, HEAD_DIM, generator=generator)
        self.k = torch.randn(num_rows, KV_HEADS, HEAD_DIM, generator=generator)
        self.v = torch.randn(num_rows, KV_HEADS, HEAD_DIM, generator=generator)

    def slots(self, i: int) -> list[int]:
        table = self.batch.block_tables[i]
        return [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(self.batch.context_lens[i])]

    def by_slot(self) -> torch.Tensor:
        """The cache as `[slots, 2, KV, D]`."""
        return self.cache.permute(0, 3, 1, 2, 4).flatten(0, 1)

    def run(self) -> torch.Tensor:
        return self.attend([self.cache], 0)

    def attend(self, caches: list[torch.Tensor], layer: int) -> torch.Tensor:
        """Without rotation."""
        attention, zero = backend(), torch.zeros(len(self.q), 1, HEAD_DIM)
        context = ForwardContext(torch.ones_like(zero), zero, caches, attention.prepare(self.batch))
        qkv = torch.cat((self.q, self.k, self.v), dim=1)
        return attention.forward(qkv, AttentionLayer(layer, HEADS), context)

    def expected(self) -> torch.Tensor:
        """After `run`, from the cache: every query over what stands before it, in float64."""
        flat, rows, row = self.by_slot().double(), [], 0
        for i, count in enumerate(self.batch.query_lens):
            keys, values = flat[self.slots(i)].unbind(1)
            for j in range(count):
                visible = self.batch.context_lens[i] - count + j + 1
                rows.append(_attend(self.q[row].double(), keys[:visible], values[:visible]))
                row += 1
        return torch.stack(rows)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    weights = torch.softmax(torch.einsum("hd,lhd->hl", q, k) / HEAD_DIM**0.5, dim=-1)
    return torch.einsum("hl,lhd->hd", weights, v)


def _in_row_order(shapes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return sorted(shapes, key=lambda shape: (shape[1] > 1, -shape[0]))


@given(
    st.lists(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, min(n, 9)))), min_size=1),
    st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_a_mixed_step_equals_the_formula(shapes: list[tuple[int, int]], seed: int) -> None:
    step = Step(_in_row_order(shapes[:8]), seed)
    out = step.run()
    torch.testing.assert_close(out.double(), step.expected(), rtol=1e-4, atol=1e-5)


def test_the_steps_own_keys_and_values_are_stored() -> None:
    step = Step([(9, 1), (6, 3)], seed=0)
    step.run()
    flat = step.by_slot()
    written = [step.slots(0)[-1], *step.slots(1)[-3:]]
    assert torch.equal(flat[written, 0], step.k)
    assert torch.equal(flat[written, 1], step.v)


def test_a_layer_uses_its_own_cache() -> None:
    step = Step([(9, 1)], seed=0)
    other = torch.zeros_like(step.cache)
    out = step.attend([other, step.cache], 1)
    torch.testing.assert_close(out.double(), step.expected(), rtol=1e-4, atol=1e-5)
    assert not bool(other.any())
