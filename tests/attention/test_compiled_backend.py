"""The CPU's backend with compiled kernels against the one with PyTorch's products, and against the formula."""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import pytest
import torch

from mmserve.attention.base import AttentionBatch, AttentionLayer
from mmserve.attention.compiled_backend import CompiledAttention, PagedDecodes
from mmserve.attention.context import ForwardContext
from mmserve.attention.torch_backend import CpuAttentionMetadata, TorchAttention
from mmserve.kernels import reference

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 6, 2, 64, 16
EPS = 1e-6
STEPS = {
    "one": [(40, 1)],
    "the first token": [(1, 1)],
    "decodes": [(300, 1), (170, 1), (17, 1), (16, 1), (1, 1)],
    "chunks": [(33, 9), (18, 18), (5, 2)],
    "mixed": [(90, 1), (33, 1), (2, 1), (70, 3), (9, 9)],
}


def attention(kind: type[TorchAttention] = CompiledAttention, dtype: torch.dtype = torch.bfloat16) -> TorchAttention:
    return kind(num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, block_size=BLOCK_SIZE, dtype=dtype)


def error(out: torch.Tensor, exact: torch.Tensor) -> float:
    return float((out.double() - exact.double()).norm() / exact.double().norm())


class Step:
    """Sequences of `(context, queries)` each in scrambled blocks; what has not been stored yet is NaN."""

    def __init__(self, shapes: Sequence[tuple[int, int]], *, is_normed: bool = False) -> None:
        generator = torch.Generator().manual_seed(len(shapes))
        counts = [-(-context // BLOCK_SIZE) for context, _ in shapes]
        ids = (torch.randperm(sum(counts), generator=generator) + 1).tolist()
        tables = [[ids.pop() for _ in range(count)] for count in counts]
        self.batch = AttentionBatch([queries for _, queries in shapes], [context for context, _ in shapes], tables)
        self.slots = torch.from_numpy(self.batch.slots(BLOCK_SIZE))
        num_rows, num_blocks = len(self.slots), 1 + sum(counts)
        cache_shape = (num_blocks, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        self.cache = torch.randn(cache_shape, generator=generator).bfloat16()
        self.cache[0] = torch.nan
        self.cache[self.slots // BLOCK_SIZE, :, :, self.slots % BLOCK_SIZE] = torch.nan
        self.qkv = torch.randn(num_rows, HEADS + 2 * KV_HEADS, HEAD_DIM, generator=generator).bfloat16()
        angles = 100 * torch.rand(num_rows, 1, HEAD_DIM // 2, generator=generator)
        self.cos = torch.cat((angles.cos(), angles.cos()), dim=-1).bfloat16()
        self.sin = torch.cat((-angles.sin(), angles.sin()), dim=-1).bfloat16()
        weights = torch.randn(2, HEAD_DIM, generator=generator).bfloat16()
        self.layer = AttentionLayer(0, HEADS, weights[0], weights[1], EPS) if is_normed else AttentionLayer(0, HEADS)

    def run(self, kind: type[TorchAttention]) -> tuple[torch.Tensor, torch.Tensor]:
        """The result, and the cache as it is left."""
        backend, cache = attention(kind), self.cache.clone()
        context = ForwardContext(self.cos, self.sin, [cache], backend.prepare(self.batch))
        return backend.forward(self.qkv.clone(), self.layer, context), cache

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The same in float64, query by query."""
        cache, layer = self.cache.double(), self.layer
        weights = [None if norm is None else norm.double() for norm in (layer.q_norm, layer.k_norm)]
        q = reference.rotate_and_store(
            *(self.qkv.double(), self.cos.double(), self.sin.double(), cache, self.slots, HEADS),
            q_weight=weights[0],
            k_weight=weights[1],
            eps=EPS,
        )
        tables: list[torch.Tensor] = []
        lengths: list[int] = []
        shapes = zip(self.batch.query_lens, self.batch.context_lens, self.batch.block_tables, strict=True)
        for num_queries, context, table in shapes:
            lengths += range(context - num_queries + 1, context + 1)
            tables += [torch.tensor(table)] * num_queries
        padded = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True)
        out = reference.paged_attention_decode(
            q, cache, padded, torch.tensor(lengths), HEAD_DIM**-0.5, max_context_len=max(lengths)
        )
        return out, cache


@pytest.mark.parametrize("shapes", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize("is_normed", [False, True])
def test_a_step_is_as_near_as_pytorchs(shapes: list[tuple[int, int]], is_normed: bool) -> None:
    step = Step(shapes, is_normed=is_normed)
    out, cache = step.run(CompiledAttention)
    theirs, their_cache = step.run(TorchAttention)
    exact, exact_cache = step.exact()
    assert out.dtype is torch.bfloat16
    assert out.shape == exact.shape
    assert error(out, exact) < 8e-3
    assert error(out, theirs) < 1.2e-2
    stored = step.slots // BLOCK_SIZE, slice(None), slice(None), step.slots % BLOCK_SIZE
    assert torch.equal(cache[stored][:, 1], their_cache[stored][:, 1])
    assert error(cache[stored], exact_cache[stored]) < 3e-3
    assert error(cache[stored], their_cache[stored]) < 8e-3


@pytest.mark.parametrize("is_normed", [False, True])
def test_nothing_but_the_steps_slots_is_written(is_normed: bool) -> None:
    step = Step(STEPS["mixed"], is_normed=is_normed)
    _, cache = step.run(CompiledAttention)
    before, after = (x.permute(0, 3, 1, 2, 4).flatten(0, 1).view(torch.int16) for x in (step.cache, cache))
    is_other = torch.ones(len(before), dtype=torch.bool)
    is_other[step.slots] = False
    assert torch.equal(before[is_other], after[is_other])
    assert not bool(cache[step.slots // BLOCK_SIZE, :, :, step.slots % BLOCK_SIZE].isnan().any())


def test_decodes_are_nearer_than_pytorchs() -> None:
    """Scores and weights are not rounded."""
    step = Step(STEPS["decodes"])
    exact, _ = step.exact()
    assert error(step.run(CompiledAttention)[0], exact) < error(step.run(TorchAttention)[0], exact)


def test_sequences_alone_are_as_in_company() -> None:
    together = Step(STEPS["decodes"])
    out, cache = together.run(CompiledAttention)
    for i in range(len(out)):
        alone = Step(STEPS["decodes"])
        alone.batch = AttentionBatch([1], [together.batch.context_lens[i]], [together.batch.block_tables[i]])
        alone.qkv, alone.cos, alone.sin = (x[i : i + 1] for x in (together.qkv, together.cos, together.sin))
        own_out, own_cache = alone.run(CompiledAttention)
        assert torch.equal(own_out[0], out[i])
        own = together.batch.block_tables[i]
        assert torch.equal(own_cache[own].view(torch.int16), cache[own].view(torch.int16))


def test_a_layer_uses_its_own_cache() -> None:
    step = Step(STEPS["decodes"])
    expected, _ = step.run(CompiledAttention)
    backend, other = attention(), torch.full_like(step.cache, torch.nan)
    context = ForwardContext(step.cos, step.sin, [other, step.cache], backend.prepare(step.batch))
    assert torch.equal(backend.forward(step.qkv, replace(step.layer, index=1), context), expected)
    assert bool(other.isnan().all())


def decodes(*shapes: tuple[int, list[int]]) -> tuple[PagedDecodes, ...]:
    batch = AttentionBatch([1] * len(shapes), [context for context, _ in shapes], [table for _, table in shapes])
    metadata = attention().prepare(batch)
    assert isinstance(metadata, CpuAttentionMetadata)
    assert all(isinstance(group, PagedDecodes) for group in metadata.decodes)
    return cast(tuple[PagedDecodes, ...], metadata.decodes)


def test_all_decodes_are_one_group() -> None:
    (group,) = decodes((100, [3, 4, 5, 6, 7, 8, 9]), (17, [1, 2]), (1, [11]))
    assert group.rows == slice(0, 3)
    assert group.context_lens.tolist() == [100, 17, 1]
    assert group.block_tables.dtype is group.context_lens.dtype is torch.int64
    assert group.block_tables.tolist() == [[3, 4, 5, 6, 7, 8, 9], [1, 2, 0, 0, 0, 0, 0], [11, 0, 0, 0, 0, 0, 0]]


def test_a_table_may_be_longer_than_the_context() -> None:
    """Blocks can be allocated ahead of the tokens."""
    (group,) = decodes((16, [3, 9, 8]), (2, [5, 6, 7]))
    assert group.block_tables.tolist() == [[3], [5]]


def test_chunks_alone_make_no_group() -> None:
    metadata = attention().prepare(AttentionBatch([3, 2], [7, 2], [[6], [8]]))
    assert isinstance(metadata, CpuAttentionMetadata)
    assert metadata.decodes == ()
    assert [(chunk.rows.start, chunk.rows.stop) for chunk in metadata.chunks] == [(0, 3), (3, 5)]
