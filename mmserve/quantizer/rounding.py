"""From a matrix to whole numbers of a few bits, in groups of columns that share a scale and a zero point."""

from dataclasses import dataclass

import torch

from mmserve.quantization.grouped_ints import GroupedInts

# Shares of a group's range that the search for clipping tries.
_SHRINKS = tuple(1.0 - 0.025 * step for step in range(21))


@dataclass(frozen=True)
class GroupForm:
    """How a group is rounded; `scale_dtype` is the precision that scales are stored in."""

    bits: int
    group_size: int
    symmetric: bool
    scale_dtype: torch.dtype

    @property
    def largest(self) -> int:
        return (1 << self.bits) - 1

    def grouped(self, weight: torch.Tensor) -> torch.Tensor:
        """`[out, in]` -> `[out, groups, group_size]`."""
        return weight.view(weight.shape[0], -1, self.group_size)

    def ranges(self, grouped: torch.Tensor, shrink: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales and zero points `[..., 1]` by which `[..., group_size]` just fits, or a share of it does."""
        if self.symmetric:
            scales = self._stored(grouped.abs().amax(-1, keepdim=True) * (2 * shrink / self.largest))
            return scales, torch.full_like(scales, float(1 << (self.bits - 1)))
        low = grouped.amin(-1, keepdim=True).clamp(max=0.0) * shrink
        high = grouped.amax(-1, keepdim=True).clamp(min=0.0) * shrink
        scales = self._stored((high - low) / self.largest)
        return scales, (-low / scales).round().clamp(0, self.largest)

    def _stored(self, scales: torch.Tensor) -> torch.Tensor:
        """As they are after storing, so that numbers fit the scales that they will meet."""
        return scales.clamp(min=torch.finfo(self.scale_dtype).smallest_normal).to(self.scale_dtype).float()

    def numbers(self, values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
        """The nearest whole numbers, float32."""
        return (values / scales + zeros).round().clamp(0, self.largest)

    def rounded(self, weight: torch.Tensor) -> torch.Tensor:
        """`[out, in]` as it is after plain rounding."""
        grouped = self.grouped(weight)
        scales, zeros = self.ranges(grouped)
        return ((self.numbers(grouped, scales, zeros) - zeros) * scales).view_as(weight)

    def ints(self, numbers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> GroupedInts:
        """numbers `[out, groups, group_size]`, scales and zeros `[out, groups, 1]`."""
        return GroupedInts.with_zeros(
            numbers.flatten(1).to(torch.uint8),
            scales.squeeze(-1),
            zeros.squeeze(-1),
            bits=self.bits,
            group_size=self.group_size,
        )


def round_to_nearest(weight: torch.Tensor, form: GroupForm) -> GroupedInts:
    grouped = form.grouped(weight)
    scales, zeros = form.ranges(grouped)
    return form.ints(form.numbers(grouped, scales, zeros), scales, zeros)


def clipped_ranges(weight: torch.Tensor, gram: torch.Tensor, form: GroupForm) -> tuple[torch.Tensor, torch.Tensor]:
    """For each group the range, shrunk or not, whose rounding changes the group's own share of the output least.

    weight `[out, in]`, gram `[in, in]` of the inputs -> scales and zero points `[out, groups, 1]`. AWQ's search for
    clipping (Lin et al. 2023, arXiv 2306.00978).
    """
    grouped = form.grouped(weight)
    blocks = _diagonal_blocks(gram, form.group_size)
    scales, zeros = form.ranges(grouped)
    least = torch.full_like(scales, torch.inf)
    for shrink in _SHRINKS:
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
