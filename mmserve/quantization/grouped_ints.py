"""Whole numbers with a scale and an offset for each group of columns: what AWQ, GPTQ and others come down to."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mmserve.errors import SetupError


@dataclass(frozen=True)
class FactorParts:
    """What a format makes scales and offsets of: `bases * steps` and `offset_bases * offset_steps`.

    Bases `[out, blocks]` are in the format's precision, each for the same number of neighbouring groups. Steps
    `[out, groups]` are whole numbers in a range of at most 256. Without `steps` the scales are the bases, and without
    `offset_bases` offsets are multiples of the scales.
    """

    bases: torch.Tensor
    steps: torch.Tensor | None
    offset_bases: torch.Tensor | None
    offset_steps: torch.Tensor

    def scales(self) -> torch.Tensor:
        """float32 `[out, groups]`."""
        return self.bases.float() if self.steps is None else _products(self.bases, self.steps)

    def offsets(self, scales: torch.Tensor) -> torch.Tensor:
        """float32 `[out, groups]`."""
        return _products(scales if self.offset_bases is None else self.offset_bases, self.offset_steps)

    def is_like(self, other: "FactorParts") -> bool:
        """Whether both can be of one matrix."""
        return (
            self.bases.shape[1] == other.bases.shape[1]
            and (self.steps is None) is (other.steps is None)
            and (self.offset_bases is None) is (other.offset_bases is None)
        )


def _products(bases: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    out_features, num_blocks = bases.shape
    return (bases.float()[:, :, None] * steps.view(out_features, num_blocks, -1).float()).flatten(1)


@dataclass(frozen=True)
class GroupedInts:
    """`weight[o, i] = numbers[o, i] * scales[o, g] + offsets[o, g]`, g being i // group_size.

    `numbers` uint8 `[out, in]` below `2 ** bits`, `scales` and `offsets` float32 `[out, in / group_size]`; `parts` is
    what these are made of, where that is smaller. With `order` int64 `[in]`, column i of `numbers` is for column
    `order[i]` of the input.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor
    bits: int
    group_size: int
    order: torch.Tensor | None = None
    parts: FactorParts | None = None

    @classmethod
    def of_parts(
        cls,
        numbers: torch.Tensor,
        parts: FactorParts,
        *,
        bits: int,
        group_size: int,
        order: torch.Tensor | None = None,
    ) -> "GroupedInts":
        scales = parts.scales()
        return cls(numbers, scales, parts.offsets(scales), bits, group_size, order, parts)

    @classmethod
    def with_zeros(
        cls,
        numbers: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor,
        *,
        bits: int,
        group_size: int,
        order: torch.Tensor | None = None,
    ) -> "GroupedInts":
        """Of `(numbers - zeros) * scales`; `scales` and `zeros` `[out, in / group_size]` of any precision.

        `SetupError` for a last group that is smaller than the others.
        """
        if numbers.shape[1] % group_size:
            raise SetupError(
                "model_unavailable",
                f"weights in groups of {group_size} are not served where a matrix has {numbers.shape[1]} columns",
            )
        parts = FactorParts(scales, None, None, -zeros.float())
        return cls.of_parts(numbers, parts, bits=bits, group_size=group_size, order=order)

    @classmethod
    def stacked(cls, ints: Sequence["GroupedInts"]) -> "GroupedInts":
        """By rows, of those that are alike."""
        parts = [one.parts for one in ints if one.parts is not None]
        return cls(
            torch.cat([one.numbers for one in ints]),
            torch.cat([one.scales for one in ints]),
            torch.cat([one.offsets for one in ints]),
            ints[0].bits,
            ints[0].group_size,
            ints[0].order,
            FactorParts(
                torch.cat([part.bases for part in parts]),
                _stacked([part.steps for part in parts]),
                _stacked([part.offset_bases for part in parts]),
                torch.cat([part.offset_steps for part in parts]),
            )
            if parts
            else None,
        )

    @property
    def out_features(self) -> int:
        return self.numbers.shape[0]

    def dequantized(self) -> torch.Tensor:
        """float32 `[out, in]`, columns as the input has them."""
        out_features, in_features = self.numbers.shape
        grouped = self.numbers.view(out_features, -1, self.group_size).float()
        weight = (grouped * self.scales[:, :, None] + self.offsets[:, :, None]).view(out_features, in_features)
        if self.order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.order, weight)

    def is_like(self, other: "GroupedInts") -> bool:
        """Whether both can be rows of one matrix."""
        same_order = self.order is other.order is None or (
            self.order is not None and other.order is not None and torch.equal(self.order, other.order)
        )
        same_parts = self.parts is other.parts is None or (
            self.parts is not None and other.parts is not None and self.parts.is_like(other.parts)
        )
        return (self.bits, self.group_size) == (other.bits, other.group_size) and same_order and same_parts


def _stacked(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    found = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(found) if found else None
