"""K and V into the pages of the cache, rotated and normed on the way."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import torch
import triton
import triton.language as tl

# Heads a program. A thread moves 16 bytes of each half: with fewer heads the loads of D = 128 get smaller. 16 were the
# best on an H200.
BLOCK_HEADS = 16


def rotate_and_store(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    num_heads: int,
    *,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """From qkv `[T, H + 2 * KV, D]`: q rotated, `[T, H, D]`; k rotated and v go to the slots `[T]` of the paged cache.

    cos and sin `[T, 1, D]`, the first half of sin negated. With weights `[D]` the heads of q and k are normed before.
    A token of slot -1 is not stored. A cache in FP8 holds k and v over their scales, cut off at the end of the range.
    """
    num_tokens, num_rows, head_dim = qkv.shape
    assert all(x.is_contiguous() for x in (qkv, cos, sin, kv_cache, slot_mapping)), "nothing has a stride"
    assert (q_weight is None) == (k_weight is None), "both are normed, or none"
    q = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    _rotate_kernel[(num_tokens, triton.cdiv(num_rows, BLOCK_HEADS))](
        q,
        qkv,
        cos,
        sin,
        kv_cache,
        slot_mapping,
        q_weight,
        k_weight,
        eps,
        1.0 / k_scale,
        1.0 / v_scale,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=kv_cache.shape[2],
        HEAD_DIM=head_dim,
        BLOCK_SIZE=kv_cache.shape[3],
        BLOCK_H=BLOCK_HEADS,
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
        num_warps=_num_warps(BLOCK_HEADS * triton.next_power_of_2(head_dim // 2)),
    )
    return q


def _num_warps(num_values: int) -> int:
    """As many as move a tile 8 values a thread."""
    return max(1, num_values // 256)


@triton.jit
def _cache_rows(kv_cache, slot, o_kv, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Where a token's rows of K and V go, K's heads counted before V's."""
    i_block, i_offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    return kv_cache + (i_block * (2 * NUM_KV_HEADS) + o_kv) * (BLOCK_SIZE * HEAD_DIM) + i_offset * HEAD_DIM


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def _rotate_kernel(
    q, qkv, cos, sin, kv_cache, slot_mapping, q_weight, k_weight, eps, k_factor, v_factor,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """One program: some of a token's heads, whose halves are two tiles `[heads, D / 2]`."""
    HALF: tl.constexpr = HEAD_DIM // 2
    i_token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + i_token)
    o_h, o_d = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_HALF)
    m_d = o_d < HALF
    m_values = (o_h < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & m_d[None, :]
    p_values = qkv + (i_token * (NUM_HEADS + 2 * NUM_KV_HEADS) + o_h)[:, None] * HEAD_DIM + o_d[None, :]
    b_first, b_second = tl.load(p_values, mask=m_values, other=0.0), tl.load(p_values + HALF, mask=m_values, other=0.0)
    b_x, b_y = b_first.to(tl.float32), b_second.to(tl.float32)
    if q_weight is not None:
        b_x, b_y = _normed(b_x, b_y, q_weight, k_weight, (o_h < NUM_HEADS)[:, None], eps, o_d, m_d, HALF)
    b_new_x, b_new_y = _rotated(b_x, b_y, cos + i_token * HEAD_DIM + o_d, sin + i_token * HEAD_DIM + o_d, m_d, HALF)
    is_rotated = (o_h < NUM_HEADS + NUM_KV_HEADS)[:, None]
    b_first = tl.where(is_rotated, b_new_x.to(b_first.dtype), b_first)
    b_second = tl.where(is_rotated, b_new_y.to(b_second.dtype), b_second)
    m_q = m_values & (o_h < NUM_HEADS)[:, None]
    p_q = q + (i_token * NUM_HEADS + o_h)[:, None] * HEAD_DIM + o_d[None, :]
    tl.store(p_q, b_first, mask=m_q)
    tl.store(p_q + HALF, b_second, mask=m_q)
    m_kv = m_values & (o_h >= NUM_HEADS)[:, None] & (slot >= 0)
    p_kv = _cache_rows(kv_cache, slot, o_h - NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE)[:, None] + o_d[None, :]
    if kv_cache.dtype.element_ty == tl.float8e4nv:
        b_factors = tl.where(is_rotated, k_factor, v_factor)
        tl.store(p_kv, _as_fp8(b_first, b_factors), mask=m_kv)
        tl.store(p_kv + HALF, _as_fp8(b_second, b_factors), mask=m_kv)
    else:
        tl.store(p_kv, b_first, mask=m_kv)
        tl.store(p_kv + HALF, b_second, mask=m_kv)


@triton.jit
def _as_fp8(b_values, b_factors):
    b_scaled = b_values.to(tl.float32) * b_factors
    return tl.minimum(tl.maximum(b_scaled, -448.0), 448.0).to(tl.float8e4nv)


@triton.jit
def _normed(b_x, b_y, q_weight, k_weight, is_query, eps, o_d, m_d, HALF: tl.constexpr):
    """Both halves of the heads, over the root of their mean square, times the weight of q or of k."""
    b_scale = tl.rsqrt((tl.sum(b_x * b_x, 1) + tl.sum(b_y * b_y, 1)) / (2 * HALF) + eps)[:, None]
    b_wx = tl.where(is_query, _row(q_weight + o_d, m_d), _row(k_weight + o_d, m_d))
    b_wy = tl.where(is_query, _row(q_weight + HALF + o_d, m_d), _row(k_weight + HALF + o_d, m_d))
    return b_x * b_scale * b_wx, b_y * b_scale * b_wy


@triton.jit
def _rotated(b_x, b_y, p_cos, p_sin, m_d, HALF: tl.constexpr):
    """The two halves of a head, turned by their angles."""
    b_new_x = b_x * _row(p_cos, m_d) + b_y * _row(p_sin, m_d)
    return b_new_x, b_y * _row(p_cos + HALF, m_d) + b_x * _row(p_sin + HALF, m_d)


@triton.jit
def _row(p_row, m_row):
    """One row for all heads, in float32."""
    return tl.load(p_row, mask=m_row, other=0.0).to(tl.float32)[None, :]
