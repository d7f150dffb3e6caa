"""Attention of packed images and windows on a GPU against its twin."""

import pytest
import torch
from kernel_checks import DEVICE, randn, relative_error

from mmserve.kernels import reference
from mmserve.kernels.varlen import IMAGE_TILE, WINDOW_TILE, query_tile, query_tiles, varlen_attention

PACKS = [[1], [16], [64, 64, 16, 4, 64], [65], [200, 3, 129], [128, 1, 64]]


# The interpreter multiplies no bfloat16.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 1e-3)])
@pytest.mark.parametrize("lengths", PACKS, ids=str)
@pytest.mark.parametrize("head_dim", [8, 64, 80])
def test_varlen(dtype: torch.dtype, tolerance: float, lengths: list[int], head_dim: int) -> None:
    check_varlen(lengths, 2, head_dim, dtype, tolerance)


@pytest.mark.parametrize("head_dim", [16, 40, 72, 96, 128])
def test_other_head_sizes(head_dim: int) -> None:
    check_varlen([70, 5], 1, head_dim, torch.float32, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 128])
@pytest.mark.parametrize(
    "lengths", [[64] * 300 + [32, 16, 8, 4], [1], [63, 65, 127, 128, 129], [577] * 5, [2831, 8000, 1]], ids=str
)
def test_varlen_of_real_sizes(lengths: list[int], head_dim: int) -> None:
    check_varlen(lengths, 16, head_dim, torch.bfloat16, 1e-2)


def check_varlen(lengths: list[int], num_heads: int, head_dim: int, dtype: torch.dtype, tolerance: float) -> None:
    """q and k rotated, so in a tensor of their own; v still inside of the product of the layer."""
    q, k = randn(sum(lengths), 2 * num_heads, head_dim, dtype=dtype).chunk(2, dim=1)
    v = randn(sum(lengths), 3 * num_heads, head_dim, dtype=dtype)[:, 2 * num_heads :]
    starts = torch.tensor([0, *lengths]).cumsum(0).to(DEVICE, torch.int32)
    rows = query_tile(lengths)
    tiles = query_tiles(lengths, rows).to(DEVICE)
    scale = 1.3 * head_dim**-0.5
    out = varlen_attention(q, k, v, starts, tiles, scale, query_tile=rows)
    expected = reference.varlen_attention(q.float(), k.float(), v.float(), starts, tiles, scale, query_tile=rows)
    assert out.dtype == dtype
    assert out.is_contiguous()
    assert relative_error(out, expected) < tolerance


def test_a_large_score_elsewhere_does_not_hide_small_ones() -> None:
    lengths = [64, 70]
    q, k, v = (randn(134, 1, 16) for _ in range(3))
    k[:64] *= 1000
    starts = torch.tensor([0, 64, 134], device=DEVICE, dtype=torch.int32)
    tiles = query_tiles(lengths, IMAGE_TILE).to(DEVICE)
    out = varlen_attention(q, k, v, starts, tiles, 0.25, query_tile=IMAGE_TILE)
    alone = torch.softmax(q[64:, 0] @ k[64:, 0].T * 0.25, dim=-1) @ v[64:, 0]
    assert relative_error(out[64:, 0], alone) < 1e-5
    assert bool(out.isfinite().all())


def test_the_twin_attends_within_each_sequence() -> None:
    lengths = [5, 3]
    q, k, v = (randn(8, 2, 4) for _ in range(3))
    starts = torch.tensor([0, 5, 8], device=DEVICE, dtype=torch.int32)
    out = reference.varlen_attention(q, k, v, starts, query_tiles(lengths, 2), 0.5, query_tile=2)
    for head in range(2):
        for rows in (slice(0, 5), slice(5, 8)):
            weights = torch.softmax(q[rows, head] @ k[rows, head].T * 0.5, dim=-1)
            assert relative_error(out[rows, head], weights @ v[rows, head]) < 1e-5


def test_tiles_cover_all_rows_and_begin_with_the_longest() -> None:
    tiles = query_tiles([3, 300, 0, 128], 128)
    assert tiles.tolist() == [[1, 0], [1, 128], [1, 256], [3, 0], [0, 0]]
    assert tiles.dtype == torch.int32
    assert query_tiles([], 64).shape == (0, 2)


def test_windows_get_the_small_tile() -> None:
    assert query_tile([64, 64, 16]) == query_tile([]) == WINDOW_TILE
    assert query_tile([64, 65]) == IMAGE_TILE


def test_nothing_to_attend_to() -> None:
    empty, starts = randn(0, 2, 16), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    out = varlen_attention(empty, empty, empty, starts, query_tiles([], 64).to(DEVICE), 1.0, query_tile=64)
    assert out.shape == (0, 2, 16)
