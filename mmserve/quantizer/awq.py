"""AWQ (Lin et al. 2023, arXiv 2306.00978): channels whose inputs are large are scaled up before rounding.

What a matrix's columns are multiplied by, the layer before it is divided by, so that the model computes the same.
"""

from collections.abc import Callable, Sequence

import torch

from mmserve.quantizer.rounding import Form, output_error, round_to_nearest

_NUM_STEPS = 20
_SMALLEST = 1e-4


def search_scales(
    weights: Sequence[torch.Tensor],
    gram: torch.Tensor,
    magnitudes: torch.Tensor,
    form: Form,
    shared: Callable[[torch.Tensor], torch.Tensor] = lambda scales: scales,
) -> torch.Tensor:
    """Factors `[in]` for the columns of `weights` `[out, in]`, which have the same inputs.

    They are `magnitudes ** alpha`, of the alpha in 0 ... 1 whose rounding changes the outputs least. `magnitudes`
    `[in]` are the inputs' mean absolute values; `shared` evens out factors that the layer before cannot have one by
    one.
    """
    best, least = torch.ones_like(magnitudes), torch.inf
    for step in range(_NUM_STEPS):
        scales = shared(magnitudes).clamp(min=_SMALLEST).pow(step / _NUM_STEPS)
        scales = scales / (scales.max() * scales.min()).sqrt()
        error = sum(
            output_error(round_to_nearest(weight * scales, form).dequantized() / scales - weight, gram)
            for weight in weights
        )
        if error < least:
            best, least = scales, error
    return best


def by_kv_head(num_heads: int, num_kv_heads: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Query heads that share a head of values can only be scaled alike, `[heads * D]` -> the same."""

    def shared(values: torch.Tensor) -> torch.Tensor:
        heads = values.view(num_kv_heads, num_heads // num_kv_heads, -1)
        return heads.mean(1, keepdim=True).expand_as(heads).reshape(-1)

    return shared


def of_kv_heads(scales: torch.Tensor, num_heads: int, num_kv_heads: int) -> torch.Tensor:
    """Factors that are shared so, once for each head of values: `[heads * D]` -> `[kv_heads * D]`."""
    return scales.view(num_kv_heads, num_heads // num_kv_heads, -1)[:, 0].reshape(-1)
