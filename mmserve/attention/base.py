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


class AttentionBackend(Protocol):
    def prepare(self, batch: AttentionBatch) -> object:
        """Whatever every layer of this step needs; it travels as `ForwardContext.attention`."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, context: ForwardContext
    ) -> torch.Tensor:
        """Store k and v `[T, KV, D]` at the step's slots, and attend with q `[T, H, D]`."""
