"""What an attention backend is told about a step, and what it must do."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from mmserve.attention.context import ForwardContext


@dataclass(frozen=True)
class AttentionBatch:
    """The sequences of a step in row order: those with one query first, longest context first, then chunks.

    `context_lens` count the tokens attended to, those of this step included; `block_tables` cover them.
    """

    query_lens: Sequence[int]
    context_lens: Sequence[int]
    block_tables: Sequence[Sequence[int]]

    def slots(self, block_size: int) -> list[int]:
        """Where this step's K and V belong, row by row: `block_id * block_size + offset`."""
        return [
            table[position // block_size] * block_size + position % block_size
            for query_len, context_len, table in zip(self.query_lens, self.context_lens, self.block_tables, strict=True)
            for position in range(context_len - query_len, context_len)
        ]


class AttentionBackend(Protocol):
    def prepare(self, batch: AttentionBatch) -> object:
        """Whatever every layer of this step needs; it travels as `ForwardContext.attention`."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, context: ForwardContext
    ) -> torch.Tensor:
        """Store k and v `[T, KV, D]` at the step's slots, and attend with q `[T, H, D]`."""
