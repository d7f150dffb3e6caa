"""Scales and offsets in the layout of PyTorch's packed product on a CPU: bfloat16 `[groups, out, 2]`."""

from typing import Protocol

import torch

from mmserve.quantization.grouped_ints import GroupedInts
from mmserve.quantization.laid_over import SmallNumbers
from mmserve.quantization.nibble_pairs import factor_of, paired_offsets

# PyTorch's formula is (number - 8) * scale + offset.
_MIDDLE = 8


class PackedScales(Protocol):
    def pairs(self, start: int, stop: int) -> torch.Tensor:
        """Those of rows `start` to `stop`, contiguous."""


def packed_scales(ints: GroupedInts, repeats: int) -> PackedScales:
    """For each group `repeats` of the product's, wider numbers being `paired`.

    Held in the parts that the format has, where it has them, and multiplied out for each product, the same to the bit.
    """
    has_offsets = bool(_packed_offsets(ints.scales, ints.offsets.clone(), ints.bits).any())
    if ints.parts is not None or not has_offsets:
        return ScalesInParts(ints, repeats, has_offsets=has_offsets)
    return PlainScales(ints, repeats)


class PlainScales:
    def __init__(self, ints: GroupedInts, repeats: int) -> None:
        offsets = _packed_offsets(ints.scales, ints.offsets.clone(), ints.bits)
        held = torch.stack((factor_of(ints.bits) * ints.scales, offsets), dim=-1).transpose(0, 1)
        self._held = held.repeat_interleave(repeats, dim=0).bfloat16().contiguous()

    def pairs(self, start: int, stop: int) -> torch.Tensor:
        return self._held[:, start:stop].contiguous()


class ScalesInParts:
    """Where all offsets are 0, as they are where numbers count from the middle of their range, these are not held."""

    def __init__(self, ints: GroupedInts, repeats: int, *, has_offsets: bool) -> None:
        self._bits, self._factor, self._repeats = ints.bits, factor_of(ints.bits), repeats
        self._steps = self._offset_bases = self._offset_steps = None
        parts = ints.parts
        if parts is None or not (has_offsets or parts.steps is not None):
            # Nothing else is made of the scales, so they can be rounded once and for all.
            self._bases, self._factor = _by_groups(self._factor * ints.scales).bfloat16(), 1
            return
        self._bases = _by_groups(parts.bases)
        self._steps = None if parts.steps is None else SmallNumbers(_by_groups(parts.steps))
        if has_offsets:
            self._offset_bases = None if parts.offset_bases is None else _by_groups(parts.offset_bases)
            self._offset_steps = SmallNumbers(_by_groups(parts.offset_steps))

    def pairs(self, start: int, stop: int) -> torch.Tensor:
        pairs = _joined(*self._factors(start, stop))
        return pairs if self._repeats == 1 else pairs.repeat_interleave(self._repeats, dim=0)

    def _factors(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        scales, offsets = self._bases[:, start:stop], None
        if self._steps is not None:
            scales = _products(scales, self._steps.rows(start, stop))
        if self._offset_steps is not None:
            scales = scales.float()
            bases = scales if self._offset_bases is None else self._offset_bases[:, start:stop]
            offsets = _products(bases, self._offset_steps.rows(start, stop))
            offsets = _packed_offsets(scales, offsets, self._bits)
        return scales if self._factor == 1 else self._factor * scales, offsets


def _by_groups(factors: torch.Tensor) -> torch.Tensor:
    return factors.transpose(0, 1).contiguous()


def _products(bases: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """float32 `[groups, rows]` of `[blocks, rows]` and `[groups, rows]`, in place of `steps`, or of one for all."""
    if len(steps) == 1:
        return bases.float() * steps
    steps.view(len(bases), -1, steps.shape[1]).mul_(bases.float()[:, None])
    return steps


def _packed_offsets(scales: torch.Tensor, offsets: torch.Tensor, bits: int) -> torch.Tensor:
    """In place of `offsets`."""
    factor = factor_of(bits)
    if factor > 1:
        paired_offsets(scales, offsets, bits)
    return offsets.add_(scales, alpha=_MIDDLE * factor)


def _joined(scales: torch.Tensor, offsets: torch.Tensor | None) -> torch.Tensor:
    """Float32 offsets are rounded in place. PyTorch interleaves two tensors more slowly than it joins their bits."""
    words = scales.bfloat16().view(torch.uint16).to(torch.int32)
    if offsets is not None:
        words.bitwise_or_(offsets.copy_(offsets.bfloat16()).view(torch.int32))
    return words.view(torch.bfloat16).view(*words.shape, 2)
