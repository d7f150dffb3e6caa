"""The kernels that a CPU runs against naive formulas in float64, one loop an axis."""

import math
import random

import numpy as np
import pytest
import torch
from kernel_checks import relative_error
from paged_cases import naive_attention

from mmserve.kernels.cpu import (
    IntArray,
    causal_attention,
    gather_kv,
    gather_rows,
    paged_attention_chunk,
    paged_attention_decode,
    rotate_,
    store_kv,
    store_rows,
)
from mmserve.kernels.reference import apply_rotary, rms_norm, silu_and_mul

SCALE = 16**-0.5
TOLERANCES = [(torch.float32, 2e-6), (torch.bfloat16, 1.2e-2)]
BLOCK_SIZE = 4
HEADS = [(1, 1), (4, 4), (4, 2), (8, 1), (9, 3), (14, 2), (16, 2)]


class PagedSequences:
    """Keys and values of several sequences in scrambled blocks of one cache; what nobody owns is far from zero."""

    def __init__(self, lengths: list[int], kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        num_blocks = sum(-(-length // BLOCK_SIZE) for length in lengths) + 3
        self.cache = torch.full((num_blocks, 2, kv_heads, BLOCK_SIZE, head_dim), 77.0, dtype=dtype)
        free = random.Random(0).sample(range(num_blocks), num_blocks)
        self.tables = [[free.pop() for _ in range(-(-length // BLOCK_SIZE))] for length in lengths]
        self.k = [torch.randn(length, kv_heads, head_dim, dtype=dtype) for length in lengths]
        self.v = [torch.randn(length, kv_heads, head_dim, dtype=dtype) for length in lengths]
        for table, k, v in zip(self.tables, self.k, self.v, strict=True):
            store_kv(torch.cat((k, v), dim=1), self.cache, store_rows(slots(table, len(k)), kv_heads, BLOCK_SIZE))


def slots(table: list[int], length: int) -> IntArray:
    return np.array([table[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(length)])


def additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, float("-inf"))


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_rms_norm(dtype: torch.dtype, tolerance: float) -> None:
    x, weight = 5 * torch.randn(7, 3, 24, dtype=dtype), torch.randn(24, dtype=dtype)
    wide = x.double()
    reference = wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + 1e-5) * weight.double()
    assert relative_error(rms_norm(x, weight, 1e-5), reference) < tolerance


def test_rms_norm_keeps_eps() -> None:
    x = torch.full((1, 4), 1e-3)
    assert relative_error(rms_norm(x, torch.ones(4), 1.0), x.double() / math.sqrt(1e-6 + 1.0)) < 1e-6


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_apply_rotary_turns_pairs_of_half_and_half(dtype: torch.dtype, tolerance: float) -> None:
    x, angles = torch.randn(5, 3, 8, dtype=dtype), torch.randn(5, 4)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    reference = torch.empty(5, 3, 8, dtype=torch.float64)
    for token in range(5):
        for i in range(4):
            a, b = x[token, :, i].double(), x[token, :, i + 4].double()
            c, s = cos[token, i].double(), sin[token, i].double()
            reference[token, :, i], reference[token, :, i + 4] = a * c - b * s, b * c + a * s
    before = x.clone()
    out = apply_rotary(x, torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None])
    assert relative_error(out, reference) < tolerance
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_in_place_is_the_same_rotation(dtype: torch.dtype) -> None:
    x, (cos, sin) = torch.randn(5, 7, 8, dtype=dtype), torch.randn(2, 5, 1, 8, dtype=dtype)
    expected, rest = apply_rotary(x[:, 1:4], cos, sin), x[:, 4:].clone()
    rotate_(x[:, 1:4], cos, sin)
    assert torch.equal(x[:, 1:4], expected)
    assert torch.equal(x[:, 4:], rest)


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_silu_and_mul(dtype: torch.dtype, tolerance: float) -> None:
    x = 3 * torch.randn(6, 20, dtype=dtype)
    gate, up, before = x[:, :10].double(), x[:, 10:].double(), x.clone()
    assert relative_error(silu_and_mul(x), gate / (1 + torch.exp(-gate)) * up) < tolerance
    assert torch.equal(x, before)


def test_store_kv_writes_its_slots_and_no_others() -> None:
    cache = torch.zeros(5, 2, 3, BLOCK_SIZE, 8)
    k, v = torch.randn(4, 3, 8), torch.randn(4, 3, 8)
    places = [(4, 3), (0, 0), (2, 1), (2, 2)]
    slot_mapping = np.array([block * BLOCK_SIZE + offset for block, offset in places])
    store_kv(torch.cat((k, v), dim=1), cache, store_rows(slot_mapping, 3, BLOCK_SIZE))
    expected = torch.zeros_like(cache)
    for i, (block, offset) in enumerate(places):
        expected[block, 0, :, offset], expected[block, 1, :, offset] = k[i], v[i]
    assert torch.equal(cache, expected)


def test_gather_kv_reads_blocks_in_table_order() -> None:
    paged = PagedSequences([8, 8], 3, 5, torch.float32)
    k, v = gather_kv(paged.cache, gather_rows(np.array(paged.tables), 3), torch.float32)
    assert k.shape == v.shape == (2, 3, 8, 5)
    for i in range(2):
        assert torch.equal(k[i].transpose(0, 1), paged.k[i])
        assert torch.equal(v[i].transpose(0, 1), paged.v[i])


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("lengths", [[1], [4], [5, 4, 3], [17, 16, 15, 13, 1], [1030], [519, 514]], ids=str)
def test_decode(dtype: torch.dtype, tolerance: float, heads: int, kv_heads: int, lengths: list[int]) -> None:
    paged = PagedSequences(lengths, kv_heads, 16, dtype)
    q = torch.randn(len(lengths), heads, 16, dtype=dtype)
    num_blocks = max(len(table) for table in paged.tables)
    padded = [table + [table[0]] * (num_blocks - len(table)) for table in paged.tables]
    visible = torch.arange(num_blocks * BLOCK_SIZE) < torch.tensor(lengths)[:, None]
    mask = additive(visible, dtype)[:, None, None]
    out = paged_attention_decode(q, paged.cache, gather_rows(np.array(padded), kv_heads), mask, SCALE)
    reference = torch.stack([naive_attention(*each, SCALE) for each in zip(q, paged.k, paged.v, strict=True)])
    assert relative_error(out, reference) < tolerance


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize(("context", "num_queries"), [(5, 2), (8, 4), (9, 8), (16, 3), (17, 16), (7, 7), (300, 270)])
def test_chunk(dtype: torch.dtype, tolerance: float, heads: int, kv_heads: int, context: int, num_queries: int) -> None:
    paged = PagedSequences([context, 6], kv_heads, 16, dtype)
    q = torch.randn(num_queries, heads, 16, dtype=dtype)
    first = context - num_queries
    rows = gather_rows(np.array(paged.tables[:1]), kv_heads)
    out = paged_attention_chunk(q, paged.cache, rows, context, SCALE)
    k, v = paged.k[0], paged.v[0]
    reference = torch.stack(
        [naive_attention(q[i], k[: first + i + 1], v[: first + i + 1], SCALE) for i in range(num_queries)]
    )
    assert relative_error(out, reference) < tolerance


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("length", [1, 2, 17, 257])
def test_causal(dtype: torch.dtype, tolerance: float, heads: int, kv_heads: int, length: int) -> None:
    q = torch.randn(length, heads, 16, dtype=dtype)
    k, v = (torch.randn(length, kv_heads, 16, dtype=dtype) for _ in range(2))
    reference = torch.stack([naive_attention(q[i], k[: i + 1], v[: i + 1], SCALE) for i in range(length)])
    out = causal_attention(q, k.transpose(0, 1), v.transpose(0, 1), SCALE)
    assert relative_error(out, reference) < tolerance


def test_the_scale_is_the_callers() -> None:
    q, k, v = torch.randn(3, 2, 16), torch.randn(2, 3, 16), torch.randn(2, 3, 16)
    halved = causal_attention(q, k, v, 0.5 * SCALE)
    torch.testing.assert_close(halved, causal_attention(q / 2, k, v, SCALE), rtol=1e-5, atol=1e-6)
