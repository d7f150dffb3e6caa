"""K and V in FP8: stored over their scales, attended to as if they had been rounded before."""

import math

import pytest
import torch
from kernel_checks import DEVICE, randn, relative_error
from paged_cases import PagedCase, paged_case

from mmserve.kernels import cpu, reference
from mmserve.kernels.kv_store import rotate_and_store
from mmserve.kernels.paged_chunk import paged_attention_chunk, query_tiles
from mmserve.kernels.paged_decode import paged_attention_decode

FP8 = torch.float8_e4m3fn
SCALE = 0.17
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 4, 2, 64, 16
SLOTS = [37, -1, 0, 16]


def fp8_case(context_lens: list[int], num_shared_blocks: int = 0) -> tuple[PagedCase, PagedCase]:
    """In FP8, and the same in float32."""
    wide = paged_case(context_lens, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, num_shared_blocks=num_shared_blocks)
    case = PagedCase(wide.kv_cache.to(FP8), wide.block_tables, wide.context_lens)
    return case, case.wide()


def stored_rows(k_scale: float, v_scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The caches of the kernel and of its twin, and what should be in the rows of `SLOTS` but for a rounding."""
    qkv = 300 * randn(len(SLOTS), HEADS + 2 * KV_HEADS, HEAD_DIM)
    turned = torch.zeros(len(SLOTS), 1, HEAD_DIM, device=DEVICE)
    slots = torch.tensor(SLOTS, device=DEVICE)
    shape = (4, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    caches = [torch.zeros(shape, device=DEVICE).to(FP8) for _ in range(2)]
    for cache, store in zip(caches, (rotate_and_store, reference.rotate_and_store), strict=True):
        store(qkv, turned + 1, turned, cache, slots, HEADS, k_scale=k_scale, v_scale=v_scale)
    return caches[0].float(), caches[1].float(), qkv[:, HEADS:]


@pytest.mark.parametrize(("k_scale", "v_scale"), [(1.0, 1.0), (4.0, 0.5)])
def test_storing(k_scale: float, v_scale: float) -> None:
    kernel, twin, kv = stored_rows(k_scale, v_scale)
    # The interpreter cuts off where a card rounds: one step of eight in a power of two.
    assert relative_error(kernel, twin) < 0.1
    factors = torch.tensor([k_scale] * KV_HEADS + [v_scale] * KV_HEADS)
    for i, slot in enumerate(SLOTS):
        if slot >= 0:
            expected = (kv[i] / factors.to(kv)[:, None]).clamp(-448, 448)
            row = twin[slot // BLOCK_SIZE, :, :, slot % BLOCK_SIZE].reshape(expected.shape)
            assert float(((row - expected).abs() / expected.abs().clamp(min=0.02)).max()) < 0.07
    assert float(twin.abs().max()) == 448.0, "some are cut off"
    assert int((kernel != 0).any(-1).sum()) == 3 * 2 * KV_HEADS, "nothing was written elsewhere"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shared", [None, 2])
def test_decoding(dtype: torch.dtype, shared: int | None) -> None:
    case, wide = fp8_case([33, 48, 129, 70], shared or 0)
    q = randn(4, HEADS, HEAD_DIM, dtype=dtype)
    num_shared = None if shared is None else torch.tensor([shared], dtype=torch.int32, device=DEVICE)
    out = paged_attention_decode(
        q, case.kv_cache, case.block_tables, case.context_lens, SCALE, num_shared_blocks=num_shared, max_context_len=200
    )
    expected = reference.paged_attention_decode(
        q.float(), wide.kv_cache, wide.block_tables, wide.context_lens, SCALE, max_context_len=200
    )
    assert out.dtype is dtype
    assert relative_error(out, expected) < (1e-4 if dtype is torch.float32 else 2e-3)


def test_chunks() -> None:
    query_lens = [65, 5, 1]
    case, wide = fp8_case([70, 33, 16])
    q = randn(sum(query_lens), HEADS, HEAD_DIM)
    starts = torch.tensor([0, 65, 70, 71], dtype=torch.int32, device=DEVICE)
    tiles = torch.from_numpy(query_tiles(query_lens)).to(DEVICE)
    out, expected = (
        attend(q, each.kv_cache, each.block_tables, starts, each.context_lens, tiles, SCALE)
        for attend, each in ((paged_attention_chunk, case), (reference.paged_attention_chunk, wide))
    )
    assert relative_error(out, expected) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_widening_is_exact(dtype: torch.dtype) -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(FP8)
    finite = ~numbers.float().isnan()
    assert torch.equal(cpu.widen(numbers, dtype)[finite].float(), numbers.float()[finite])
    assert int(finite.sum()) == 254


def test_on_the_cpu() -> None:
    cache = torch.zeros(4, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM).to(FP8)
    kv = 300 * torch.randn(1, 2 * KV_HEADS, HEAD_DIM)
    cpu.store_kv(kv, cache, cpu.store_rows(torch.tensor([37]).numpy(), KV_HEADS, BLOCK_SIZE), 2.0, 4.0)
    k, v = cpu.gather_kv(cache, cpu.gather_rows(torch.tensor([[2]]).numpy(), KV_HEADS), torch.float32)
    for part, stored, scale in ((kv[0, :KV_HEADS], k, 2.0), (kv[0, KV_HEADS:], v, 4.0)):
        expected = (part / scale).clamp(-448, 448).to(FP8).float()
        assert torch.equal(stored[0, :, 37 % BLOCK_SIZE], expected)
        assert math.isclose(float(stored.abs().sum()), float(expected.abs().sum()), rel_tol=1e-6)
