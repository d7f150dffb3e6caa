"""K and V into pages, rotated and normed or not: the twin against loops, the kernel against the twin."""

import math
from typing import Any

import pytest
import torch
from kernel_checks import randn, relative_error

from mmserve.kernels import reference
from mmserve.kernels.kv_store import rotate_and_store

SLOTS = [37, -1, 0, 16, 79, 31]
NUM_SLOTS = 160


def empty_cache(num_kv_heads: int, block_size: int, head_dim: int, like: torch.Tensor) -> torch.Tensor:
    shape = (NUM_SLOTS // block_size, 2, num_kv_heads, block_size, head_dim)
    return torch.full(shape, math.nan, dtype=like.dtype, device=like.device)


def angles(num_tokens: int, head_dim: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin `[T, 1, D]` as the rotary table gives them."""
    turns = 6 * torch.rand(num_tokens, 1, head_dim // 2)
    cos, sin = torch.cat((turns.cos(), turns.cos()), -1), torch.cat((-turns.sin(), turns.sin()), -1)
    return cos.to(like), sin.to(like)


def slots_like(x: torch.Tensor) -> torch.Tensor:
    """More tokens than `SLOTS` names are not stored."""
    return torch.tensor(SLOTS + [-1] * (len(x) - len(SLOTS)), device=x.device)


def weights_like(x: torch.Tensor, normed: bool) -> dict[str, Any]:
    if not normed:
        return {}
    q_weight, k_weight = (1 + torch.rand(x.shape[-1]).to(x) for _ in range(2))
    return {"q_weight": q_weight, "k_weight": k_weight, "eps": 1e-2}


def errors_of_rotation(qkv: torch.Tensor, num_heads: int, block_size: int, normed: bool) -> tuple[float, float]:
    """Of the queries and of the cache, against the twin in float32; what is not stored stays as it was."""
    num_kv_heads, head_dim = (qkv.shape[1] - num_heads) // 2, qkv.shape[2]
    cos, sin = angles(len(qkv), head_dim, qkv)
    weights, slots = weights_like(qkv, normed), slots_like(qkv)
    cache, wide_cache = (empty_cache(num_kv_heads, block_size, head_dim, x) for x in (qkv, qkv.float()))
    q = rotate_and_store(qkv, cos, sin, cache, slots, num_heads, **weights)
    wide_weights: dict[str, Any] = {
        name: x.float() if isinstance(x, torch.Tensor) else x for name, x in weights.items()
    }
    wide_q = reference.rotate_and_store(
        qkv.float(), cos.float(), sin.float(), wide_cache, slots, num_heads, **wide_weights
    )
    assert q.dtype == qkv.dtype
    assert torch.equal(cache.isnan(), wide_cache.isnan())
    return relative_error(q, wide_q), relative_error(cache.nan_to_num(), wide_cache.nan_to_num())


@pytest.mark.parametrize("normed", [False, True])
def test_twin_of_rotation(normed: bool) -> None:
    qkv = randn(len(SLOTS), 4, 8)
    weights, cache = weights_like(qkv, normed), empty_cache(1, 16, 8, qkv)
    cos, sin = angles(len(qkv), 8, qkv)
    q = reference.rotate_and_store(qkv, cos, sin, cache, slots_like(qkv), 2, **weights)
    for i, slot in enumerate(SLOTS):
        rotated = []
        for head, name in ((0, "q_weight"), (1, "q_weight"), (2, "k_weight")):
            x = qkv[i, head].double()
            if normed:
                x = x / torch.sqrt((x * x).mean() + weights["eps"]) * weights[name].double()
            c, s = cos[i, 0, :4].double(), sin[i, 0, 4:].double()
            rotated.append(torch.cat((x[:4] * c - x[4:] * s, x[4:] * c + x[:4] * s)))
        assert relative_error(q[i], torch.stack(rotated[:2])) < 1e-5
        if slot >= 0:
            stored = cache[slot // 16, :, 0, slot % 16]
            assert relative_error(stored, torch.stack((rotated[2], qkv[i, 3].double()))) < 1e-5
            stored.fill_(math.nan)
    assert cache.isnan().all(), "nothing was written elsewhere"


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 128])
def test_rotation_of_head_sizes(head_dim: int, block_size: int, normed: bool) -> None:
    errors = errors_of_rotation(randn(len(SLOTS), 8, head_dim), 4, block_size, normed)
    assert max(errors) < 1e-5


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (7, 1), (14, 2), (16, 8), (20, 20)])
def test_rotation_of_heads(num_heads: int, num_kv_heads: int, normed: bool) -> None:
    errors = errors_of_rotation(randn(len(SLOTS), num_heads + 2 * num_kv_heads, 16), num_heads, 16, normed)
    assert max(errors) < 1e-5


def test_rotation_of_halves() -> None:
    assert max(errors_of_rotation(randn(len(SLOTS), 8, 64, dtype=torch.float16), 4, 16, normed=True)) < 2e-3


@pytest.mark.gpu
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 128])
def test_rotation_on_the_card(head_dim: int, block_size: int, normed: bool) -> None:
    for num_tokens in (len(SLOTS), 300):
        for num_heads, num_kv_heads in ((32, 32), (28, 4), (32, 8)):
            qkv = randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=torch.bfloat16)
            assert max(errors_of_rotation(qkv, num_heads, block_size, normed)) < 1e-2
