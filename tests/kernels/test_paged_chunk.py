"""Paged causal attention of chunks: the twin against a naive formula, the kernel against the twin."""

import itertools

import pytest
import torch
from kernel_checks import DEVICE, relative_error
from paged_cases import PagedCase, naive_attention, naive_rows, paged_case

from mmserve.kernels import reference
from mmserve.kernels.paged_chunk import paged_attention_chunk, query_tiles

SCALE = 0.17


def chunk_arguments(
    case: PagedCase, query_lens: list[int], group: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, where each sequence's begin, and tiles."""
    cache = case.kv_cache
    shape = (sum(query_lens), cache.shape[2] * group, cache.shape[4])
    q = torch.randn(shape, dtype=cache.dtype, device=cache.device)
    starts = torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32, device=cache.device)
    return q, starts, torch.from_numpy(query_tiles(query_lens)).to(cache.device)


def error_of_kernel(case: PagedCase, query_lens: list[int], group: int = 1) -> float:
    """Against the twin in float32."""
    q, starts, tiles = chunk_arguments(case, query_lens, group)
    rest = (case.block_tables, starts, case.context_lens, tiles, SCALE)
    out = paged_attention_chunk(q, case.kv_cache, *rest)
    expected = reference.paged_attention_chunk(q.float(), case.wide().kv_cache, *rest)
    assert out.dtype == q.dtype
    return relative_error(out, expected)


@pytest.mark.parametrize("group", [1, 4])
def test_twin(group: int) -> None:
    case, query_lens = paged_case([5, 40, 1]), [5, 3, 1]
    q, starts, tiles = chunk_arguments(case, query_lens, group)
    out = reference.paged_attention_chunk(q, case.kv_cache, case.block_tables, starts, case.context_lens, tiles, SCALE)
    expected: list[torch.Tensor] = []
    for i, (context_len, query_len) in enumerate(zip(case.context_lens.tolist(), query_lens, strict=True)):
        for position in range(context_len - query_len, context_len):
            expected.append(naive_attention(q[len(expected)], *naive_rows(case, i, position + 1), SCALE))
    assert relative_error(out, torch.stack(expected)) < 1e-5


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 128])
def test_head_sizes(head_dim: int, block_size: int) -> None:
    case = paged_case([70, 33], num_kv_heads=1, head_dim=head_dim, block_size=block_size)
    assert error_of_kernel(case, [70, 5], group=2) < 1e-4


@pytest.mark.parametrize("group", [1, 2, 4, 7, 8])
def test_groups(group: int) -> None:
    assert error_of_kernel(paged_case([80, 17], head_dim=16), [66, 17], group) < 1e-4


@pytest.mark.parametrize("block_size", [1, 2, 4, 8])
def test_small_blocks(block_size: int) -> None:
    case = paged_case([70, 33], num_kv_heads=1, head_dim=8, block_size=block_size)
    assert error_of_kernel(case, [66, 5], group=2) < 1e-4


@pytest.mark.parametrize("prefix", [0, 1, 15, 16, 63, 64, 65, 200])
def test_prefixes_and_tile_edges(prefix: int) -> None:
    query_lens = [1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129]
    case = paged_case([prefix + length for length in query_lens], num_kv_heads=1, head_dim=16)
    assert error_of_kernel(case, query_lens) < 1e-4


def test_halves() -> None:
    assert error_of_kernel(paged_case([100, 33], dtype=torch.float16), [90, 33], group=2) < 2e-3


def test_a_part_of_a_step() -> None:
    case, query_lens = paged_case([20, 40], head_dim=16), [20, 4]
    q, starts, tiles = chunk_arguments(case, query_lens, 1)
    step = torch.full((30, *q.shape[1:]), 7.0, device=DEVICE)
    arguments = (q, case.kv_cache, case.block_tables, starts, case.context_lens, tiles, SCALE)
    out = paged_attention_chunk(*arguments, out=step[6:])
    assert out.data_ptr() == step[6].data_ptr()
    assert torch.equal(out, paged_attention_chunk(*arguments))
    assert (step[:6] == 7.0).all()


def test_query_tiles_cover_all_the_latest_first() -> None:
    tiles = query_tiles([130, 0, 64, 300])
    assert tiles.dtype.name == "int32"
    assert sorted(map(tuple, tiles.tolist())) == [
        *((0, first) for first in range(0, 130, 64)),
        (2, 0),
        *((3, first) for first in range(0, 300, 64)),
    ]
    assert (tiles[:-1, 1] >= tiles[1:, 1]).all()
    assert query_tiles([]).shape == (0, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 128])
def test_head_sizes_on_the_card(head_dim: int, block_size: int) -> None:
    query_lens = [1, 2, 63, 64, 65, 127, 128, 129, 300]
    lengths = [length + prefix for length, prefix in zip(query_lens, (0, 31, 64, 65, 1000, 0, 16, 129, 0), strict=True)]
    case = paged_case(lengths, head_dim=head_dim, block_size=block_size, dtype=torch.bfloat16)
    assert error_of_kernel(case, query_lens, group=4) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize(("num_kv_heads", "group"), [(32, 1), (4, 7), (8, 4), (3, 2), (2, 8)])
@pytest.mark.parametrize(
    ("lengths", "query_lens"),
    [([256] * 8, [256] * 8), ([2831, 2831], [2831, 700]), ([2112] * 4, [64] * 4), ([8000], [900])],
)
def test_models_on_the_card(num_kv_heads: int, group: int, lengths: list[int], query_lens: list[int]) -> None:
    case = paged_case(lengths, num_kv_heads=num_kv_heads, head_dim=128, dtype=torch.bfloat16)
    assert error_of_kernel(case, query_lens, group) < 1e-2


@pytest.mark.gpu
def test_float32_on_the_card() -> None:
    for head_dim in (16, 64, 128):
        case = paged_case([300, 65], head_dim=head_dim)
        assert error_of_kernel(case, [140, 65], group=2) < 1e-5
