"""Weights that make up for inputs that are off, and eight bits rounded by inputs: always judged on fresh inputs."""

from dataclasses import dataclass

import pytest
import torch

from mmserve.quantizer.drift import corrected
from mmserve.quantizer.gptq import gptq
from mmserve.quantizer.rounding import Form, GroupForm, RoundedMatrix, RowForm, round_to_nearest
from mmserve.quantizer.statistics import InputStatistics

OUT, IN = 48, 128
INT4 = GroupForm(4, 32, False, torch.float32)


def matrix() -> torch.Tensor:
    return torch.randn(OUT, IN, generator=torch.Generator().manual_seed(1)).div(IN**0.5)


@dataclass(frozen=True)
class Sample:
    """Inputs and residuals as the quantized model has them, and as the float model does."""

    x: torch.Tensor
    wanted_x: torch.Tensor
    residual: torch.Tensor
    wanted_residual: torch.Tensor

    def error(self, weight: torch.Tensor, made: torch.Tensor) -> float:
        """Of the sums, against the float model's."""
        wanted = self.wanted_residual + self.wanted_x @ weight.T
        return float((self.residual + self.x @ made.T - wanted).norm() / wanted.norm())

    def known(self, *, with_residual: bool = True) -> InputStatistics:
        statistics = InputStatistics.empty(IN, torch.device("cpu"))
        change = self.wanted_residual - self.residual
        for rows in torch.split(torch.arange(len(self.x)), 700):
            statistics.add(self.x[rows], (self.wanted_x - self.x)[rows], change[rows] if with_residual else None)
        return statistics


def sample(seed: int, num_tokens: int = 3000) -> Sample:
    """What the layers before have done is mostly a mix of the inputs, the same for all tokens, and some noise."""
    fixed, fresh = torch.Generator().manual_seed(2), torch.Generator().manual_seed(seed)
    spread = torch.randn(32, IN, generator=fixed) / 32**0.5
    mix = 0.1 * torch.randn(IN, IN, generator=fixed) / IN**0.5
    to_residual = 0.1 * torch.randn(IN, OUT, generator=fixed) / IN**0.5
    wanted = torch.randn(num_tokens, 32, generator=fresh) @ spread
    wanted += 0.3 * torch.randn(num_tokens, IN, generator=fresh)
    x = wanted + wanted @ mix + 0.05 * torch.randn(num_tokens, IN, generator=fresh)
    residual = torch.randn(num_tokens, OUT, generator=fresh)
    return Sample(x, wanted, residual + wanted @ to_residual, residual)


def rounded(weight: torch.Tensor, known: InputStatistics, form: Form) -> torch.Tensor:
    return gptq(weight, known.gram, form, damping=0.01, act_order=True).dequantized()


@pytest.mark.parametrize("form", [INT4, RowForm("fp8", torch.float32), RowForm("int8", torch.float32)])
def test_correction_beats_gptq_alone(form: Form) -> None:
    weight, known, fresh = matrix(), sample(3).known(), sample(4)
    alone = fresh.error(weight, rounded(weight, known, form))
    without_residual = corrected(weight, sample(3).known(with_residual=False))
    by_inputs = fresh.error(weight, rounded(without_residual, known, form))
    by_both = fresh.error(weight, rounded(corrected(weight, known), known, form))
    assert by_inputs < 0.95 * alone
    assert by_both < 0.95 * by_inputs


def test_inputs_that_are_right_are_left_alone() -> None:
    x, weight = sample(3).x, matrix()
    known = InputStatistics.empty(IN, torch.device("cpu"))
    known.add(x, torch.zeros_like(x), torch.zeros(len(x), OUT))
    assert torch.equal(corrected(weight, known), weight)
    assert corrected(weight, sample(3).known()) is not weight
    bare = InputStatistics.empty(IN, torch.device("cpu"))
    bare.add(x)
    assert corrected(weight, bare) is weight


def test_correction_is_the_least_squares_solution() -> None:
    """Up to its ridge, which is small beside inputs as plain as these."""
    some, weight = sample(3), matrix()
    wanted = some.wanted_x @ weight.T + some.wanted_residual - some.residual
    solution = torch.linalg.lstsq(some.x.double(), wanted.double()).solution.T.float()
    found = corrected(weight, some.known())
    assert some.error(weight, found) == pytest.approx(some.error(weight, solution), rel=0.02)
    assert some.error(weight, found) < 0.95 * some.error(weight, weight)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_eight_bits_by_inputs_beat_plain_rounding(kind: str) -> None:
    form = RowForm(kind, torch.bfloat16)  # type: ignore[arg-type]
    weight, known, fresh = matrix(), sample(3).known(), sample(4)
    weight[:, 7] *= 6

    def error(made: RoundedMatrix) -> float:
        return float((fresh.x @ (made.dequantized() - weight).T).norm() / (fresh.x @ weight.T).norm())

    made = gptq(weight, known.gram, form, damping=0.01, act_order=True)
    assert error(made) < 0.8 * error(round_to_nearest(weight, form))
    kept = made.numbers.to(torch.float8_e4m3fn if kind == "fp8" else torch.int8).float()
    assert torch.equal(kept, made.numbers)
    assert torch.equal(made.scales.bfloat16().float(), made.scales)
    assert made.scales.shape == (OUT, 1, 1)
