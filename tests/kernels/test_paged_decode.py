"""Paged attention of one query a sequence: the twin against a naive formula, the kernel against the twin."""

import math

import pytest
import torch
from kernel_checks import DEVICE, relative_error
from paged_cases import PagedCase, naive_attention, naive_rows, paged_case

from mmserve.kernels import paged_decode, reference
from mmserve.kernels.paged_decode import max_splits, num_shared_splits, paged_attention_decode

SCALE = 0.17
EDGES = [1, 15, 16, 17, 31, 33, 63, 64, 65, 129]


def queries(case: PagedCase, group: int) -> torch.Tensor:
    cache = case.kv_cache
    return torch.randn(
        len(case.context_lens), cache.shape[2] * group, cache.shape[4], dtype=cache.dtype, device=cache.device
    )


def error_of_kernel(case: PagedCase, group: int = 1, max_context_len: int = 8192, shared: int | None = None) -> float:
    """Against the twin in float32; `shared` blocks are announced to both."""
    q, wide = queries(case, group), case.wide()
    num_shared = None if shared is None else torch.tensor([shared], dtype=torch.int32, device=q.device)
    out = paged_attention_decode(
        q, case.kv_cache, case.block_tables, case.context_lens, SCALE,
        num_shared_blocks=num_shared, max_context_len=max_context_len,
    )  # fmt: skip
    expected = reference.paged_attention_decode(
        q.float(), wide.kv_cache, wide.block_tables, wide.context_lens, SCALE,
        num_shared_blocks=num_shared, max_context_len=max_context_len,
    )  # fmt: skip
    assert out.dtype == q.dtype
    return relative_error(out, expected)


def split_into(monkeypatch: pytest.MonkeyPatch, splits: int, rows: int) -> None:
    """Let contexts of `rows` sequences times KV heads be cut into so many parts at most."""
    monkeypatch.setattr(paged_decode, "num_processors", lambda device: splits * rows)
    monkeypatch.setattr(paged_decode, "PROGRAMS_PER_PROCESSOR", 1)


@pytest.mark.parametrize("group", [1, 4])
def test_twin(group: int) -> None:
    case = paged_case([1, 16, 0, 41])
    q = queries(case, group)
    out = reference.paged_attention_decode(
        q, case.kv_cache, case.block_tables, case.context_lens, SCALE, max_context_len=41
    )
    lengths = case.context_lens.tolist()
    expected = [
        naive_attention(q[i], *naive_rows(case, i, n), SCALE) if n else 0.0 * q[i] for i, n in enumerate(lengths)
    ]
    assert relative_error(out, torch.stack([each.double() for each in expected])) < 1e-5


@pytest.mark.parametrize("block_size", [1, 2, 4, 8])
def test_small_blocks(block_size: int) -> None:
    case = paged_case([1, 70, 33], head_dim=8, block_size=block_size)
    assert error_of_kernel(case, group=2) < 1e-4


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 128])
def test_head_sizes(head_dim: int, block_size: int) -> None:
    case = paged_case([1, 100, 33], head_dim=head_dim, block_size=block_size)
    assert error_of_kernel(case, group=2) < 1e-4


@pytest.mark.parametrize("group", [1, 2, 4, 7, 8])
def test_groups(group: int) -> None:
    assert error_of_kernel(paged_case([70, 16], head_dim=16), group) < 1e-4


@pytest.mark.parametrize("splits", [1, 3])
def test_lengths_around_edges(monkeypatch: pytest.MonkeyPatch, splits: int) -> None:
    split_into(monkeypatch, splits, rows=len(EDGES))
    assert error_of_kernel(paged_case(EDGES, num_kv_heads=1, head_dim=16), group=2) < 1e-4


def test_halves() -> None:
    assert error_of_kernel(paged_case([100, 33], dtype=torch.float16), group=4) < 2e-3


@pytest.mark.parametrize("splits", [1, 2, 5, 32])
def test_splits_and_their_counters(monkeypatch: pytest.MonkeyPatch, splits: int) -> None:
    split_into(monkeypatch, splits, rows=4)
    case = paged_case([333, 40], head_dim=16)
    for _ in range(2):
        assert error_of_kernel(case, group=3) < 1e-4
    assert not paged_decode._arrivals(case.kv_cache.device).any()


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("shared", [None, 0, 2])
def test_a_padded_row_is_zero(monkeypatch: pytest.MonkeyPatch, shared: int | None, splits: int) -> None:
    split_into(monkeypatch, splits, rows=6)
    case = paged_case([150, 0, 90], head_dim=16, num_shared_blocks=shared or 0)
    q, num_shared = (
        queries(case, 2),
        None if shared is None else torch.tensor([shared], dtype=torch.int32, device=DEVICE),
    )
    # The queries over shared blocks are read as they lie, and NaN there makes NumPy warn.
    q[1] = 1e4 if shared else math.nan
    out = paged_attention_decode(
        q, case.kv_cache, case.block_tables, case.context_lens, SCALE,
        num_shared_blocks=num_shared, max_context_len=150,
    )  # fmt: skip
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert out.isfinite().all()


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("shared", [0, 1, 4, 9])
def test_shared_prefixes(monkeypatch: pytest.MonkeyPatch, shared: int, splits: int) -> None:
    split_into(monkeypatch, splits, rows=6)
    lengths = [16 * shared + own for own in (1, 17, 130)]
    assert error_of_kernel(paged_case(lengths, head_dim=16, num_shared_blocks=shared), group=2, shared=shared) < 1e-4


def test_shared_prefix_of_more_rows_than_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_decode, "num_processors", lambda device: 6)
    case = paged_case([160 + own for own in range(1, 20)], num_kv_heads=1, head_dim=16, num_shared_blocks=10)
    assert error_of_kernel(case, group=7, shared=10) < 1e-4


def test_the_result_goes_where_it_is_wanted() -> None:
    case = paged_case([20, 5], head_dim=16)
    q, step = queries(case, 1), torch.full((4, 2, 16), 7.0, device=DEVICE)
    arguments = (q, case.kv_cache, case.block_tables, case.context_lens, SCALE)
    assert paged_attention_decode(*arguments, max_context_len=20, out=step[1:3]).data_ptr() == step[1].data_ptr()
    assert torch.equal(step[1:3], paged_attention_decode(*arguments, max_context_len=20))
    assert (step[[0, 3]] == 7.0).all()


def test_numbers_of_splits() -> None:
    programs = paged_decode.PROGRAMS_PER_PROCESSOR * 132
    assert max_splits(256 * 32, 132) == 1
    assert max_splits(programs, 132) == 1
    assert max_splits(programs - 1, 132) == 2
    assert max_splits(1, 132) == paged_decode.MAX_SPLITS
    assert max_splits(paged_decode.MAX_COUNTED + 1, 10**6) == 1
    assert num_shared_splits(2, 32, 132) == 2
    assert num_shared_splits(100, 32, 132) == 1
    assert num_shared_splits(1, 1, 132) == paged_decode.MAX_SHARED_SPLITS


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 128])
def test_head_sizes_on_the_card(head_dim: int, block_size: int) -> None:
    lengths = [1, 7, *EDGES, 255, 256, 257, 2900, 8000]
    case = paged_case(lengths, head_dim=head_dim, block_size=block_size, dtype=torch.bfloat16)
    assert error_of_kernel(case, group=4) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [None, 0, 1, 128])
@pytest.mark.parametrize(("num_kv_heads", "group"), [(32, 1), (4, 7), (8, 4), (3, 2), (2, 8)])
def test_models_on_the_card(num_kv_heads: int, group: int, shared: int | None) -> None:
    lengths = [16 * (shared or 0) + 64 + i % 65 for i in range(256)]
    case = paged_case(
        lengths, num_kv_heads=num_kv_heads, head_dim=128, num_shared_blocks=shared or 0, dtype=torch.bfloat16,
    )  # fmt: skip
    assert error_of_kernel(case, group, shared=shared) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1, 64, 300, 2900, 8000])
def test_one_sequence_on_the_card(length: int) -> None:
    for num_kv_heads, group in ((32, 1), (4, 7), (8, 4)):
        case = paged_case([length], num_kv_heads=num_kv_heads, head_dim=128, dtype=torch.bfloat16)
        for _ in range(3):
            assert error_of_kernel(case, group) < 1e-2


@pytest.mark.gpu
def test_float32_on_the_card() -> None:
    lengths = [16 * 3 + own for own in (1, 64, 500)]
    for head_dim in (64, 128):
        case = paged_case(lengths, head_dim=head_dim, num_shared_blocks=3)
        assert error_of_kernel(case, group=4, shared=3) < 1e-5
        assert error_of_kernel(case, group=4) < 1e-5


@pytest.mark.gpu
def test_a_graph_follows_its_inputs() -> None:
    case = paged_case([3000, 100, 777], num_kv_heads=4, head_dim=128, dtype=torch.bfloat16)
    q = queries(case, 7)
    arguments = (q, case.kv_cache, case.block_tables, case.context_lens, SCALE)
    paged_attention_decode(*arguments, max_context_len=8192)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention_decode(*arguments, max_context_len=8192)
    for lengths in ([3000, 100, 777], [64, 0, 1], [2999, 65, 512]):
        case.context_lens.copy_(torch.tensor(lengths))
        q.normal_()
        graph.replay()
        expected = reference.paged_attention_decode(
            q.float(), case.kv_cache.float(), case.block_tables, case.context_lens, SCALE, max_context_len=8192
        )
        assert relative_error(out, expected) < 1e-2
