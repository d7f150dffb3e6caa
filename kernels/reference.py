"""The kernels in plain PyTorch: the twin, of the same signature, that every other implementation is tested against.

Shapes: T tokens of a step, H query heads, KV key/value heads, D head size, L context length. A layer's paged cache is
`[num_blocks, 2, KV, block_size, D]`, K before V; a slot is `block_id * block_size + offset`.
"""

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last axis (Zhang and Sennrich 2019)."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of x and residual, `[T, size]` each, normed; and the sum itself, in its dtype."""
    total = residual + x
    return rms_norm(total, weight, eps), total


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Layer norm over the last axis (Ba et al. 2016)."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of x and residual, `[T, size]` each, normed; and the sum itself, in its dtype."""
    total = residual + x
    return layer_norm(total, weight, bias, eps), total


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the halves of each head. x `[T, H, D]`; cos and sin `[T, 1, D]`, the first half of sin negated."""
    return (x * cos).addcmul_(torch.roll(x, x.shape[-1] // 2, dims=-1), sin)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` where x is gate and up side by side, `[T, 2 * I]` -> `[T, I]` (Shazeer 2020)."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def resample(image: torch.Tensor, starts: torch.Tensor, weights: torch.Tensor, precision_bits: int) -> torch.Tensor:
    """Weighted sums along the middle axis, in whole numbers: uint8 `[A, L, B]` -> `[A, P, B]`, P being the outputs.

    Output i begins at input `starts[i]`; `weights` int32 `[taps, P]` have `precision_bits` after the point, and are 0
    where there is no input. Sums are rounded half up and clamped to bytes (Pillow's resampling).
    """
    total = torch.full((), 1 << (precision_bits - 1), dtype=torch.int32, device=image.device)
    for tap, weight in enumerate(weights):
        inputs = image.index_select(1, (starts + tap).clamp(max=image.shape[1] - 1))
        total = total + inputs.to(torch.int32) * weight[:, None]
    return (total >> precision_bits).clamp_(0, 255).to(torch.uint8)
