"""Numbers of five to eight bits as pairs of four, so that products with four bits multiply them too.

A number is `F * high + low`, F being `2 ** (bits - 4)`. Each group of columns becomes two side by side, one of highs
and one of lows, under the one scale; the input of the lows is divided by F, which floating-point numbers bear
unrounded.
"""

import torch

from mmserve.quantization.grouped_ints import GroupedInts

_MIDDLE = 8


def factor_of(bits: int) -> int:
    """F; 1 where a number is one of four bits already."""
    return 1 << max(bits - 4, 0)


def paired(ints: GroupedInts) -> GroupedInts:
    """`[out, 2 * in]` of four bits in groups twice as large, for inputs that were `paired_input`."""
    return GroupedInts(
        paired_numbers(ints.numbers, ints.bits, ints.group_size),
        factor_of(ints.bits) * ints.scales,
        paired_offsets(ints.scales, ints.offsets.clone(), ints.bits),
        bits=4,
        group_size=2 * ints.group_size,
    )


def paired_numbers(numbers: torch.Tensor, bits: int, group_size: int) -> torch.Tensor:
    """uint8 `[out, in]` -> `[out, 2 * in]` of four bits."""
    grouped = numbers.view(len(numbers), -1, group_size)
    highs, lows = grouped >> (bits - 4), (grouped & (factor_of(bits) - 1)) + _added(bits)
    return torch.cat((highs, lows), dim=-1).view(len(numbers), -1)


def paired_offsets(scales: torch.Tensor, offsets: torch.Tensor, bits: int) -> torch.Tensor:
    """Of groups of pairs, in place of `offsets`; both are those of the numbers before they were paired."""
    added = _added(bits)
    if added:
        offsets.sub_(scales, alpha=added)
    return offsets.div_(1 + 1 / factor_of(bits))


def _added(bits: int) -> int:
    """Products count from 8. So do lows of up to three bits, of which then no offset remains."""
    return _MIDDLE if factor_of(bits) <= _MIDDLE else 0


def paired_input(x: torch.Tensor, group_size: int, factor: int) -> torch.Tensor:
    """x `[T, in]` -> `[T, 2 * in]`; `group_size` is that of the numbers before they were paired."""
    grouped = x.reshape(x.shape[0], -1, group_size)
    return torch.cat((grouped, grouped * (1 / factor)), dim=-1).view(x.shape[0], -1)


def merged(weight: torch.Tensor, group_size: int, factor: int) -> torch.Tensor:
    """A matrix `[out, 2 * in]` for paired inputs -> `[out, in]` for plain ones."""
    highs, lows = weight.view(weight.shape[0], -1, 2, group_size).unbind(dim=2)
    return torch.add(highs, lows, alpha=1 / factor).flatten(1)
