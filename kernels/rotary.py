"""Rotary position embedding of heads that lie anywhere in a token's row (Su et al. 2021)."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl

# Pairs of values a program.
_BLOCK = 1024
_NUM_WARPS = 4


@triton.jit(do_not_specialize=["num_tokens"])
def _rotary_kernel(
    x,
    cos,
    sin,
    out,
    num_tokens,
    token_stride,
    head_stride,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One pair of values a lane, heads and tokens packed, so that no head size leaves lanes idle."""
    o_pairs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o_heads, o_dims = o_pairs // HALF, o_pairs % HALF
    o_tokens = (o_heads // NUM_HEADS).to(tl.int64)
    # By tokens, not pairs: the compiler sees that neighbours have one mask, and loads 16 bytes at a time.
    m_pairs = o_tokens < num_tokens
    p_x = x + o_tokens * token_stride + (o_heads % NUM_HEADS) * head_stride + o_dims
    p_out = out + o_heads.to(tl.int64) * (2 * HALF) + o_dims
    # The second halves: in the first ones, cos is the same and sin negated.
    o_angles = o_tokens * (2 * HALF) + HALF + o_dims
    b_cos = tl.load(cos + o_angles, mask=m_pairs, other=0.0).to(tl.float32)
    b_sin = tl.load(sin + o_angles, mask=m_pairs, other=0.0).to(tl.float32)
    b_first = tl.load(p_x, mask=m_pairs, other=0.0).to(tl.float32)
    b_second = tl.load(p_x + HALF, mask=m_pairs, other=0.0).to(tl.float32)
    b_out = b_first * b_cos - b_second * b_sin
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_pairs)
    b_out = b_second * b_cos + b_first * b_sin
    tl.store(p_out + HALF, b_out.to(out.dtype.element_ty), mask=m_pairs)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the halves of each head, in float32. x `[T, H, D]`, only its last axis dense -> contiguous, of x's dtype.

    cos and sin `[T, 1, D]`: both halves of cos are the same, the first half of sin is the second one negated.
    """
    num_tokens, num_heads, head_dim = x.shape
    assert x.stride(2) == 1, "the values of a head lie side by side"
    assert cos.is_contiguous(), "cos is dense"
    assert sin.is_contiguous(), "sin is dense"
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_pairs = x.numel() // 2
    if num_pairs == 0:
        return out
    _rotary_kernel[(triton.cdiv(num_pairs, _BLOCK),)](
        x,
        cos,
        sin,
        out,
        num_tokens,
        x.stride(0),
        x.stride(1),
        NUM_HEADS=num_heads,
        HALF=head_dim // 2,
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
    )
    return out
