"""Whole numbers with a scale and an offset for each group of columns: what AWQ, GPTQ and others come down to."""

from dataclasses import dataclass

import torch

from mmserve.errors import SetupError


@dataclass(frozen=True)
class GroupedInts:
    """`weight[o, i] = numbers[o, i] * scales[o, g] + offsets[o, g]`, g being i // group_size.

    `numbers` uint8 `[out, in]` below `2 ** bits`, `scales` and `offsets` float32 `[out, in / group_size]`. With `order`
    int64 `[in]`, column i of `numbers` is for column `order[i]` of the input.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor
    bits: int
    group_size: int
    order: torch.Tensor | None = None

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
        scales = scales.float()
        return cls(numbers, scales, -zeros.float() * scales, bits, group_size, order)

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
        return (self.bits, self.group_size) == (other.bits, other.group_size) and same_order
