"""Resampling of pictures in whole numbers, as Pillow does it."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit(do_not_specialize=["length", "num_pixels", "inner", "num_taps"])
def _resample_kernel(
    p_image, p_starts, p_weights, p_out, length, num_pixels, inner, num_taps, BITS: tl.constexpr, BLOCK: tl.constexpr
):
    """One program: BLOCK neighbouring bytes of the output `[A, num_pixels, inner]`, all of one A."""
    num_blocks = tl.cdiv(num_pixels * inner, BLOCK)
    i_outer = (tl.program_id(0) // num_blocks).to(tl.int64)
    o_out = (tl.program_id(0) % num_blocks) * BLOCK + tl.arange(0, BLOCK)
    m_out = o_out < num_pixels * inner
    b_pixel = o_out // inner
    b_inner = o_out - b_pixel * inner
    b_start = tl.load(p_starts + b_pixel, mask=m_out, other=0)
    p_inputs = p_image + i_outer * length * inner
    b_sum = tl.full((BLOCK,), 1 << (BITS - 1), tl.int32)
    i_tap = 0
    # Triton's interpreter has no loop over a bound that is no constant.
    while i_tap < num_taps:
        o_input = tl.minimum(b_start + i_tap, length - 1) * inner + b_inner
        b_input = tl.load(p_inputs + o_input, mask=m_out, other=0).to(tl.int32)
        b_weight = tl.load(p_weights + i_tap * num_pixels + b_pixel, mask=m_out, other=0)
        b_sum += b_input * b_weight
        i_tap += 1
    b_byte = tl.minimum(tl.maximum(b_sum >> BITS, 0), 255)
    tl.store(p_out + i_outer * num_pixels * inner + o_out, b_byte.to(tl.uint8), mask=m_out)


def resample(image: torch.Tensor, starts: torch.Tensor, weights: torch.Tensor, precision_bits: int) -> torch.Tensor:
    """As `reference.resample`; contiguous tensors, starts and weights in int32."""
    assert all(x.is_contiguous() for x in (image, starts, weights)), "everything is dense"
    outer, length, inner = image.shape
    num_taps, num_pixels = weights.shape
    out = torch.empty(outer, num_pixels, inner, dtype=torch.uint8, device=image.device)
    grid = (outer * triton.cdiv(num_pixels * inner, _BLOCK),)
    _resample_kernel[grid](
        image, starts, weights, out, length, num_pixels, inner, num_taps, BITS=precision_bits, BLOCK=_BLOCK
    )
    return out
