"""GPTQ (Frantar et al. 2022, arXiv 2210.17323): columns are rounded in turn, those to come make up for the error."""

from math import isfinite

import torch

from mmserve.errors import SetupError
from mmserve.quantizer.rounding import Form, RoundedMatrix, best_ranges

# Columns whose corrections reach the rest of the matrix in one product; a multiple of every group size.
_BLOCK = 128


def gptq(weight: torch.Tensor, gram: torch.Tensor, form: Form, *, damping: float, act_order: bool) -> RoundedMatrix:
    """weight `[out, in]` and the gram `[in, in]` of its inputs, float32.

    With `act_order` columns of large inputs come first. Groups stay those of neighbouring columns, their ranges fixed
    beforehand, so that the result is stored and multiplied like any other.
    """
    dead = gram.diagonal() == 0
    weight = weight.masked_fill(dead, 0.0)
    scales, zeros = best_ranges(weight, gram, form)
    order = torch.arange(weight.shape[1], device=weight.device)
    if act_order:
        order = gram.diagonal().argsort(descending=True, stable=True)
    groups = form.groups_of(order)
    factor = _inverse_factor(gram[order][:, order], damping)
    numbers = torch.empty_like(weight)
    numbers[:, order] = _rounded_in_turn(weight[:, order], factor, scales[:, groups, 0], zeros[:, groups, 0], form)
    return RoundedMatrix(form.grouped(numbers), scales, zeros)


def _inverse_factor(gram: torch.Tensor, damping: float) -> torch.Tensor:
    """The upper Cholesky factor of the inverse, after as much damping as it takes. Raises `SetupError`."""
    mean = float(gram.diagonal().mean()) or 1.0
    if not isfinite(mean):
        raise SetupError(
            "model_unavailable", "what the model computes of the texts is not finite: its weights are too large"
        )
    while True:
        damped = gram.clone()
        damped.diagonal().add_(damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper: torch.Tensor
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return upper
        damping *= 10


def _rounded_in_turn(
    weight: torch.Tensor, factor: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, form: Form
) -> torch.Tensor:
    """All `[out, in]`, columns in the order of rounding; `weight` is used up."""
    numbers = torch.empty_like(weight)
    for start in range(0, weight.shape[1], _BLOCK):
        end = min(start + _BLOCK, weight.shape[1])
        block, errors = weight[:, start:end].clone(), torch.empty_like(weight[:, start:end])
        own = factor[start:end, start:end]
        for i in range(end - start):
            scale, zero = scales[:, start + i], zeros[:, start + i]
            number = form.numbers(block[:, i], scale, zero)
            numbers[:, start + i] = number
            errors[:, i] = (block[:, i] - (number - zero) * scale) / own[i, i]
            block[:, i + 1 :] -= errors[:, i, None] * own[i, i + 1 :]
        weight[:, end:] -= errors @ factor[start:end, end:]
    return numbers
