"""AWQ and GPTQ on matrices alone: against plain rounding, and against their papers' formulas done the slow way."""

import pytest
import torch

from mmserve.quantizer.awq import by_kv_head, of_kv_heads, search_scales
from mmserve.quantizer.gptq import gptq
from mmserve.quantizer.rounding import (
    GroupForm,
    best_ranges,
    output_error,
    round_in_best_ranges,
    round_to_nearest,
)
from mmserve.quantizer.statistics import InputStatistics

OUT, IN = 48, 256
DAMPING = 0.01


def form(symmetric: bool, group_size: int = 64) -> GroupForm:
    return GroupForm(4, group_size, symmetric, torch.float32)


def matrix() -> torch.Tensor:
    return torch.randn(OUT, IN, generator=torch.Generator().manual_seed(1))


def inputs(num_tokens: int = 2000) -> InputStatistics:
    """Channels that depend on each other, some of them much larger: what activations are like."""
    generator = torch.Generator().manual_seed(2)
    mixed = torch.randn(num_tokens, 64, generator=generator) @ torch.randn(64, IN, generator=generator) / 8
    mixed += 0.3 * torch.randn(num_tokens, IN, generator=generator)
    mixed *= torch.where(torch.rand(IN, generator=generator) < 0.03, 20.0, 1.0)
    statistics = InputStatistics.empty(IN, torch.device("cpu"))
    for part in torch.split(mixed, 300):
        statistics.add(part)
    return statistics


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq_beats_plain_rounding(symmetric: bool, group_size: int, act_order: bool) -> None:
    weight, known, shape = matrix(), inputs(), form(symmetric, group_size)
    ints = gptq(weight, known.gram, shape, damping=DAMPING, act_order=act_order)
    plain = output_error(round_to_nearest(weight, shape).dequantized() - weight, known.gram)
    assert output_error(ints.dequantized() - weight, known.gram) < 0.6 * plain


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_awq_beats_plain_rounding(symmetric: bool, group_size: int) -> None:
    weight, known, shape = matrix(), inputs(), form(symmetric, group_size)
    scales = search_scales([weight], known.gram, known.magnitudes, shape)
    scaled, unscaled = weight * scales, known.unscaled(scales)
    ints = round_in_best_ranges(scaled, unscaled.gram, shape)
    plain = output_error(round_to_nearest(weight, shape).dequantized() - weight, known.gram)
    assert output_error(ints.dequantized() / scales - weight, known.gram) < 0.7 * plain


def slow_gptq(weight: torch.Tensor, gram: torch.Tensor, shape: GroupForm) -> torch.Tensor:
    """Frantar et al., equation 2, in float64: after each column the inverse is that of the columns to come."""
    scales, zeros = best_ranges(weight, gram, shape)
    weight, hessian = weight.double().clone(), gram.double().clone()
    hessian.diagonal().add_(DAMPING * hessian.diagonal().mean())
    numbers = torch.empty_like(weight)
    for i in range(weight.shape[1]):
        inverse = torch.linalg.inv(hessian[i:, i:])
        scale, zero = scales[:, i // shape.group_size, 0].double(), zeros[:, i // shape.group_size, 0].double()
        numbers[:, i] = shape.numbers(weight[:, i], scale, zero)
        error = weight[:, i] - (numbers[:, i] - zero) * scale
        weight[:, i:] -= (error / inverse[0, 0])[:, None] * inverse[0]
    return numbers


def test_gptq_is_the_papers_update() -> None:
    weight, known, shape = matrix(), inputs(), form(symmetric=False)
    ints = gptq(weight, known.gram, shape, damping=DAMPING, act_order=False)
    # A value that lies between two numbers may fall to either side in the other precision.
    assert float((ints.numbers.flatten(1) == slow_gptq(weight, known.gram, shape)).float().mean()) > 0.99


def test_gptq_with_inputs_that_never_come() -> None:
    weight, known = matrix(), inputs()
    known.gram[:, 7] = known.gram[7] = 0.0
    ints = gptq(weight, known.gram, form(symmetric=False), damping=DAMPING, act_order=True)
    assert torch.isfinite(ints.dequantized()).all()
    assert torch.equal(ints.dequantized()[:, 7], torch.zeros(OUT))


def test_gptq_with_fewer_tokens_than_columns() -> None:
    ints = gptq(matrix(), inputs(num_tokens=5).gram, form(symmetric=True), damping=1e-7, act_order=True)
    assert torch.isfinite(ints.dequantized()).all()


def test_statistics_do_not_depend_on_how_tokens_come() -> None:
    x = torch.randn(40, 6, dtype=torch.float32, generator=torch.Generator().manual_seed(3))
    known = InputStatistics.empty(6, torch.device("cpu"))
    for part in torch.split(x, [1, 30, 9]):
        known.add(part[None])
    assert torch.allclose(known.gram, x.T @ x / 40, atol=1e-6)
    assert torch.allclose(known.magnitudes, x.abs().mean(0), atol=1e-6)


def test_heads_that_share_values_are_scaled_alike() -> None:
    values = torch.arange(1.0, 13.0)
    shared = by_kv_head(4, 2)(values)
    assert torch.equal(shared.view(2, 2, 3)[:, 0], shared.view(2, 2, 3)[:, 1])
    assert torch.equal(of_kv_heads(shared, 4, 2), shared.view(2, 2, 3)[:, 0].flatten())


def test_scales_are_rounded_before_the_numbers() -> None:
    weight = matrix()
    ints = round_to_nearest(weight, GroupForm(4, 64, symmetric=False, scale_dtype=torch.bfloat16))
    assert torch.equal(ints.scales, ints.scales.bfloat16().float())
    assert float((ints.dequantized() - weight).abs().max()) < float(ints.scales.max()) * 0.6
