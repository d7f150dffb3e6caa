"""The rotation of heads on a CPU, compiled, and what it stores, against its twin in float64."""

from dataclasses import dataclass

import pytest
import torch
from compiled_kernels import is_rounded_once, random_bfloats, torch_threads

from mmserve.kernels import cpu_fused, reference

EPS = 1e-6


@dataclass(frozen=True)
class Rotation:
    """Queries, keys and values of a step, `[T, H + 2 * KV, D]`, for slots in no order of a cache that is not empty."""

    qkv: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    kv_cache: torch.Tensor
    slots: torch.Tensor
    num_heads: int

    def run(self, q_weight: torch.Tensor | None = None, k_weight: torch.Tensor | None = None) -> None:
        """In place."""
        tensors = self.qkv, self.cos, self.sin, self.kv_cache, self.slots
        cpu_fused.rotate_and_store(*tensors, self.num_heads, q_weight=q_weight, k_weight=k_weight, eps=EPS)

    def exact(
        self, q_weight: torch.Tensor | None = None, k_weight: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries, and the cache as it is afterwards."""
        cache = self.kv_cache.double()
        q_wide, k_wide = (None if weight is None else weight.double() for weight in (q_weight, k_weight))
        wide = self.qkv.double(), self.cos.double(), self.sin.double(), cache, self.slots
        q = reference.rotate_and_store(*wide, self.num_heads, q_weight=q_wide, k_weight=k_wide, eps=EPS)
        return q, cache

    def by_slot(self) -> torch.Tensor:
        """A copy of the cache as `[slots, 2, KV, D]`."""
        return self.kv_cache.permute(0, 3, 1, 2, 4).flatten(0, 1).clone()


def rotation(
    num_tokens: int, num_heads: int = 4, num_kv_heads: int = 2, head_dim: int = 64, block_size: int = 8
) -> Rotation:
    generator = torch.Generator().manual_seed(num_tokens)
    angles = 100 * torch.rand(num_tokens, 1, head_dim // 2, generator=generator)
    cos, sin = angles.cos(), angles.sin()
    num_blocks = -(-num_tokens // block_size) + 2
    return Rotation(
        random_bfloats(num_tokens, num_heads + 2 * num_kv_heads, head_dim),
        torch.cat((cos, cos), dim=-1).bfloat16(),
        torch.cat((-sin, sin), dim=-1).bfloat16(),
        random_bfloats(num_blocks, 2, num_kv_heads, block_size, head_dim, seed=1),
        torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens],
        num_heads,
    )


def check(case: Rotation, q_weight: torch.Tensor | None = None, k_weight: torch.Tensor | None = None) -> None:
    """Keys and queries are rounded once, values and what lies beside the slots are as they were, bit for bit."""
    q, cache = case.exact(q_weight, k_weight)
    num_kv_heads = case.kv_cache.shape[2]
    values, before = case.qkv[:, -num_kv_heads:].clone(), case.by_slot()
    case.run(q_weight, k_weight)
    after = case.by_slot()
    assert is_rounded_once(case.qkv[:, : case.num_heads], q, 2e-6)
    exact_keys = cache.permute(0, 3, 1, 2, 4).flatten(0, 1)[case.slots, 0]
    assert is_rounded_once(after[case.slots, 0], exact_keys, 2e-6)
    assert torch.equal(case.qkv[:, case.num_heads : -num_kv_heads], after[case.slots, 0])
    assert torch.equal(after[case.slots, 1], values)
    assert torch.equal(case.qkv[:, -num_kv_heads:], values)
    is_other = torch.ones(len(after), dtype=torch.bool)
    is_other[case.slots] = False
    assert torch.equal(after[is_other], before[is_other])


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (4, 2), (9, 3)])
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_rotate_and_store(head_dim: int, is_normed: bool, num_heads: int, num_kv_heads: int, num_tokens: int) -> None:
    weights = [2 * random_bfloats(head_dim, seed=i) for i in (2, 3)] if is_normed else []
    check(rotation(num_tokens, num_heads, num_kv_heads, head_dim), *weights)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("is_normed", [False, True])
def test_many_tokens(threads: int, is_normed: bool) -> None:
    weights = [random_bfloats(64, seed=i) for i in (2, 3)] if is_normed else []
    case = rotation(331)
    assert case.qkv.numel() > cpu_fused._MIN_NUMBERS_FOR_THREADS
    with torch_threads(threads):
        check(case, *weights)


@pytest.mark.parametrize("block_size", [1, 3, 16, 32])
def test_block_sizes(block_size: int) -> None:
    check(rotation(21, block_size=block_size))


def test_a_cache_inside_a_larger_one() -> None:
    """The layers' caches may lie side by side."""
    case = rotation(9)
    layers = torch.stack([case.kv_cache] * 3)
    check(Rotation(case.qkv, case.cos, case.sin, layers[1], case.slots, case.num_heads))
    assert torch.equal(layers[0], case.kv_cache)
    assert torch.equal(layers[2], case.kv_cache)


def test_eps_counts_where_heads_are_small() -> None:
    case = rotation(3)
    case.qkv.mul_(1e-3)
    check(case, *(random_bfloats(64, seed=i) for i in (2, 3)))


def test_values_that_are_not_finite_are_stored_as_they_are() -> None:
    case = rotation(4)
    case.qkv[1, -1, 3], case.qkv[2, -2, 7] = float("inf"), float("nan")
    values = case.qkv[:, -2:].clone()
    clean = rotation(4)
    clean.run()
    case.run()
    stored = case.by_slot()[case.slots]
    assert torch.equal(stored[:, 1].view(torch.int16), values.view(torch.int16))
    assert torch.equal(stored[:, 0], clean.by_slot()[clean.slots, 0])


def test_a_key_that_is_not_finite_stays_in_its_head() -> None:
    case, clean = rotation(4), rotation(4)
    case.qkv[1, 4, 3] = float("nan")
    clean.run()
    case.run()
    is_other = torch.ones(4, 8, dtype=torch.bool)
    is_other[1, 4] = False
    assert bool(case.qkv[1, 4, 3].isnan())
    assert torch.equal(case.qkv[is_other], clean.qkv[is_other])


def test_no_tokens() -> None:
    case = rotation(0)
    before = case.by_slot()
    case.run()
    assert torch.equal(case.by_slot(), before)
