"""What a step's forward pass is given, gathered on the host from the scheduled sequences."""

import itertools
from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from mmserve.attention.base import AttentionBatch
from mmserve.engine.scheduler import ScheduledSequence
from mmserve.layers.mrope import PromptPositions
from mmserve.request import Sequence

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class StepInputs:
    """T tokens of the rows, which are ordered as `AttentionBatch` asks.

    Where `sources` is not -1, a token is the one that row of the step before has sampled, and stands in no list yet.
    `positions` are `[T]`, or `[3, T]` with three axes.
    """

    rows: Rows[ScheduledSequence]
    token_ids: IntArray
    sources: IntArray | None
    positions: IntArray
    attention: AttentionBatch

    @property
    def is_decode(self) -> bool:
        """Whether every row is one token whose successor is wanted."""
        return len(self.token_ids) == len(self.rows) and all(scheduled.samples for scheduled in self.rows)

    @property
    def sampling(self) -> list[ScheduledSequence]:
        return [scheduled for scheduled in self.rows if scheduled.samples]

    @property
    def last_tokens(self) -> list[int]:
        """Places in `token_ids` whose logits are sampled from, in the order of `sampling`."""
        ends = itertools.accumulate(self.attention.query_lens)
        return [end - 1 for end, scheduled in zip(ends, self.rows, strict=True) if scheduled.samples]


class InputBuilder:
    """Keeps the layout of prompts whose positions have several axes, as long as their sequences live."""

    def __init__(self, *, has_multiple_axes: bool) -> None:
        self._has_multiple_axes = has_multiple_axes
        self._prompt_positions: WeakKeyDictionary[Sequence, PromptPositions] = WeakKeyDictionary()

    def build(self, sequences: Rows[ScheduledSequence], sampled_rows: Mapping[Sequence, int]) -> StepInputs:
        """`sampled_rows`: where the step before has sampled for a sequence."""
        rows = sorted(sequences, key=_row_order)
        token_ids, sources = _tokens(rows, sampled_rows)
        attention = AttentionBatch(
            query_lens=[scheduled.num_scheduled_tokens for scheduled in rows],
            context_lens=[scheduled.end for scheduled in rows],
            block_tables=[scheduled.sequence.block_ids for scheduled in rows],
        )
        return StepInputs(rows, token_ids, sources, self._positions(rows), attention)

    def _positions(self, rows: Rows[ScheduledSequence]) -> IntArray:
        if self._has_multiple_axes:
            return np.concatenate([self._slice(scheduled) for scheduled in rows], axis=1)
        return np.fromiter((i for scheduled in rows for i in range(scheduled.start, scheduled.end)), dtype=np.int64)

    def _slice(self, scheduled: ScheduledSequence) -> IntArray:
        sequence = scheduled.sequence
        if sequence not in self._prompt_positions:
            positions = PromptPositions(len(sequence.prompt_token_ids), sequence.images)
            self._prompt_positions[sequence] = positions
        return self._prompt_positions[sequence].slice(scheduled.start, scheduled.end)


def _row_order(scheduled: ScheduledSequence) -> tuple[bool, int]:
    """Single queries first, longest context first, as `AttentionBatch` asks."""
    return scheduled.num_scheduled_tokens > 1, -scheduled.end


def _tokens(rows: Rows[ScheduledSequence], sampled_rows: Mapping[Sequence, int]) -> tuple[IntArray, IntArray | None]:
    token_ids: list[int] = []
    pending: list[tuple[int, int]] = []
    for scheduled in rows:
        known = scheduled.sequence.tokens(scheduled.start, scheduled.end)
        token_ids += known
        if len(known) < scheduled.num_scheduled_tokens:
            pending.append((len(token_ids), sampled_rows[scheduled.sequence]))
            token_ids.append(0)
    if not pending:
        return np.array(token_ids, dtype=np.int64), None
    sources = np.full(len(token_ids), -1, dtype=np.int64)
    places, values = zip(*pending, strict=True)
    sources[list(places)] = values
    return np.array(token_ids, dtype=np.int64), sources
