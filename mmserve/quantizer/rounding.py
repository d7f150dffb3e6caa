"""From a matrix to numbers of few bits, of which groups of columns, or whole rows, share a scale and a zero point."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from mmserve.quantization.eight_bit import FP8_MAX, INT8_MAX, to_numbers

# Shares of a group's range that the search for the best one tries.
_SHRINKS = tuple(1.0 - 0.025 * step for step in range(21))
# E4M3 is finer just below a power of two than just above it, wherever a scale puts a row's weights: an octave of scales
# has all cases, and those that are larger than need be cut nothing off.
_OCTAVE = tuple(2.0 ** (step / 16) for step in range(16))


class Form(Protocol):
    """What a weight may be: `(number - zero) * scale`."""

    @property
    def shrinks(self) -> Sequence[float]: ...

    def grouped(self, weight: torch.Tensor) -> torch.Tensor:
        """`[out, in]` -> `[out, groups, group_size]`."""
        ...

    def groups_of(self, columns: torch.Tensor) -> torch.Tensor: ...

    def ranges(self, grouped: torch.Tensor, shrink: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales and zero points `[..., 1]` by which `[..., group_size]` just fits, or a share of it does."""
        ...

    def numbers(self, values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
        """The nearest ones that can be stored, float32."""
        ...


@dataclass(frozen=True)
class GroupForm:
    """Whole numbers, in groups of columns; `scale_dtype` is the precision that scales are stored in."""

    bits: int
    group_size: int
    symmetric: bool
    scale_dtype: torch.dtype

    @property
    def largest(self) -> int:
        return (1 << self.bits) - 1

    @property
    def shrinks(self) -> Sequence[float]:
        return _SHRINKS

    def grouped(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.view(weight.shape[0], -1, self.group_size)

    def groups_of(self, columns: torch.Tensor) -> torch.Tensor:
        return columns // self.group_size

    def ranges(self, grouped: torch.Tensor, shrink: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        if self.symmetric:
            scales = _stored(grouped.abs().amax(-1, keepdim=True) * (2 * shrink / self.largest), self.scale_dtype)
            return scales, torch.full_like(scales, float(1 << (self.bits - 1)))
        low = grouped.amin(-1, keepdim=True).clamp(max=0.0) * shrink
        high = grouped.amax(-1, keepdim=True).clamp(min=0.0) * shrink
        scales = _stored((high - low) / self.largest, self.scale_dtype)
        return scales, (-low / scales).round().clamp(0, self.largest)

    def numbers(self, values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
        return (values / scales + zeros).round().clamp(0, self.largest)


@dataclass(frozen=True)
class RowForm:
    """FP8 (E4M3) or int8, in rows; zero points are zero."""

    kind: Literal["fp8", "int8"]
    scale_dtype: torch.dtype

    @property
    def shrinks(self) -> Sequence[float]:
        return _OCTAVE if self.kind == "fp8" else _SHRINKS

    def grouped(self, weight: torch.Tensor) -> torch.Tensor:
        return weight[:, None]

    def groups_of(self, columns: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(columns)

    def ranges(self, grouped: torch.Tensor, shrink: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        largest = grouped.abs().amax(-1, keepdim=True) * shrink
        scales = _stored(largest / (FP8_MAX if self.kind == "fp8" else INT8_MAX), self.scale_dtype)
        return scales, torch.zeros_like(scales)

    def numbers(self, values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        return to_numbers(values, scales, self.kind).float()


def _stored(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As they are after storing, so that numbers fit the scales that they will meet."""
    return scales.clamp(min=torch.finfo(dtype).smallest_normal).to(dtype).float()


@dataclass(frozen=True)
class RoundedMatrix:
    """numbers `[out, groups, group_size]`, scales and zeros `[out, groups, 1]`, all float32."""

    numbers: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor

    def dequantized(self) -> torch.Tensor:
        """`[out, in]`."""
        return ((self.numbers - self.zeros) * self.scales).flatten(1)


def round_to_nearest(weight: torch.Tensor, form: Form) -> RoundedMatrix:
    return _rounded(weight, form, *form.ranges(form.grouped(weight)))


def round_in_best_ranges(weight: torch.Tensor, gram: torch.Tensor, form: Form) -> RoundedMatrix:
    return _rounded(weight, form, *best_ranges(weight, gram, form))


def _rounded(weight: torch.Tensor, form: Form, scales: torch.Tensor, zeros: torch.Tensor) -> RoundedMatrix:
    return RoundedMatrix(form.numbers(form.grouped(weight), scales, zeros), scales, zeros)


def best_ranges(weight: torch.Tensor, gram: torch.Tensor, form: Form) -> tuple[torch.Tensor, torch.Tensor]:
    """For each group the range, shrunk or not, whose rounding changes the group's own share of the output least.

    weight `[out, in]`, gram `[in, in]` of the inputs -> scales and zero points `[out, groups, 1]`. AWQ's search for
    clipping (Lin et al. 2023, arXiv 2306.00978).
    """
    grouped = form.grouped(weight)
    blocks = _diagonal_blocks(gram, grouped.shape[-1])
    scales, zeros = form.ranges(grouped)
    least = torch.full_like(scales, torch.inf)
    for shrink in form.shrinks:
        some_scales, some_zeros = form.ranges(grouped, shrink)
        change = (form.numbers(grouped, some_scales, some_zeros) - some_zeros) * some_scales - grouped
        by_group = change.transpose(0, 1)
        errors = (torch.bmm(by_group, blocks) * by_group).sum(-1).T.unsqueeze(-1)
        better = errors < least
        least = torch.where(better, errors, least)
        scales = torch.where(better, some_scales, scales)
        zeros = torch.where(better, some_zeros, zeros)
    return scales, zeros


def _diagonal_blocks(gram: torch.Tensor, size: int) -> torch.Tensor:
    """`[in, in]` -> `[groups, size, size]`."""
    num_groups = gram.shape[0] // size
    return gram.view(num_groups, size, num_groups, size).diagonal(dim1=0, dim2=2).permute(2, 0, 1).contiguous()


def output_error(change: torch.Tensor, gram: torch.Tensor) -> float:
    """What a change `[out, in]` of a matrix does to its outputs: their mean squared length, by the inputs' gram."""
    return float(((change @ gram) * change).sum())
