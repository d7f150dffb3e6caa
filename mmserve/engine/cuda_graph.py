"""Decoding steps captured as CUDA graphs: one launch instead of hundreds, where the host would be the limit."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mmserve.attention.triton_backend import DecodeTables, TritonAttentionMetadata, num_shared_blocks
from mmserve.engine.step_inputs import StepInputs

# Tensors of a decoding step -> logits `[B, vocab]` and each row's best token `[B]`.
DecodeStep = Callable[["DecodeTensors"], tuple[torch.Tensor, torch.Tensor]]
# Rows of the one tensor in which a step's numbers travel; the positions follow them.
_TOKEN, _SOURCE, _SLOT, _CONTEXT_LEN, _SHARED, _POSITION = range(6)
_SMALLEST_SHARING_BATCH = 16


@dataclass(frozen=True)
class DecodeTensors:
    """Of B rows with one token each; see `StepInputs`. All on the device."""

    token_ids: torch.Tensor
    sources: torch.Tensor
    positions: torch.Tensor
    attention: TritonAttentionMetadata


@dataclass(frozen=True)
class _Captured:
    """A graph, the tensor from which it reads, and those to which it writes."""

    graph: torch.cuda.CUDAGraph
    numbers: torch.Tensor
    logits: torch.Tensor
    best: torch.Tensor


class DecodeGraphs:
    """A captured step for each of a few batch sizes; a smaller batch is padded with rows that have no context.

    Batches whose sequences share their first blocks have graphs of their own, of fewer sizes.
    """

    def __init__(
        self,
        step: DecodeStep,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        num_axes: int,
        device: torch.device,
    ) -> None:
        self._step = step
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._num_axes = num_axes
        self._device = device
        shape = (max_num_seqs, -(-max_model_len // block_size))
        self._tables = torch.zeros(shape, dtype=torch.int32, device=device)
        # The copy of one step may still be under way while the next one is written.
        self._host_tables = [torch.zeros(shape, dtype=torch.int32, pin_memory=True) for _ in range(2)]
        self._captured: dict[tuple[int, bool], _Captured] = {}
        self._sizes = batch_sizes(max_num_seqs)
        large = [size for size in self._sizes if size >= _SMALLEST_SHARING_BATCH]
        self._sharing_sizes = [size for size in large if size.bit_count() == 1] or [0]

    def capture(self) -> None:
        """Compile, and capture every size, the largest first: smaller ones fit into its memory."""
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self._sizes):
            for shares in (False, True):
                if not shares or size in self._sharing_sizes:
                    self._captured[size, shares] = self._capture(size, shares, pool)

    def takes(self, inputs: StepInputs) -> bool:
        return inputs.is_decode and len(inputs.rows) <= self._sizes[-1]

    def replay(self, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits `[rows, vocab]` and best tokens `[rows]`, valid until the next call."""
        num_rows, attention = len(inputs.rows), inputs.attention
        tables = self._write_tables(inputs)
        num_shared = num_shared_blocks(tables, attention.context_lens, self._block_size)
        sizes = self._sharing_sizes if num_shared and num_rows <= self._sharing_sizes[-1] else self._sizes
        size = next(size for size in sizes if size >= num_rows)
        captured = self._captured[size, sizes is not self._sizes]
        numbers = np.zeros((_POSITION + self._num_axes, size), dtype=np.int32)
        numbers[_SOURCE] = numbers[_SLOT] = -1
        numbers[_TOKEN, :num_rows] = inputs.token_ids
        if inputs.sources is not None:
            numbers[_SOURCE, :num_rows] = inputs.sources
        numbers[_SLOT, :num_rows] = attention.slots(self._block_size)
        numbers[_CONTEXT_LEN, :num_rows] = attention.context_lens
        numbers[_SHARED, 0] = num_shared
        numbers[_POSITION:, :num_rows] = inputs.positions
        captured.numbers.copy_(torch.from_numpy(numbers).pin_memory(), non_blocking=True)
        captured.graph.replay()
        return captured.logits[:num_rows], captured.best[:num_rows]

    def _write_tables(self, inputs: StepInputs) -> npt.NDArray[np.int32]:
        host = self._host_tables[0]
        self._host_tables.reverse()
        tables = host.numpy()
        block_tables = inputs.attention.block_tables
        for row, table in enumerate(block_tables):
            tables[row, : len(table)] = table
        self._tables[: len(block_tables)].copy_(host[: len(block_tables)], non_blocking=True)
        return tables[: len(block_tables), : max(map(len, block_tables))]

    def _capture(self, size: int, shares: bool, pool: Any) -> _Captured:
        numbers = torch.zeros((_POSITION + self._num_axes, size), dtype=torch.int32, device=self._device)
        numbers[_SOURCE : _SLOT + 1] = -1
        graph = torch.cuda.CUDAGraph()
        self._step(self._tensors(numbers, shares))
        torch.cuda.synchronize(self._device)
        with torch.cuda.graph(graph, pool=pool):
            logits, best = self._step(self._tensors(numbers, shares))
        return _Captured(graph, numbers, logits, best)

    def _tensors(self, numbers: torch.Tensor, shares: bool) -> DecodeTensors:
        """Views of the tensors that a graph reads, in the precision that its kernels take."""
        positions = numbers[_POSITION] if self._num_axes == 1 else numbers[_POSITION:]
        tables = DecodeTables(
            self._tables[: numbers.shape[1]],
            numbers[_CONTEXT_LEN],
            self._max_model_len,
            numbers[_SHARED, :1] if shares else None,
        )
        metadata = TritonAttentionMetadata(numbers[_SLOT].long(), tables, None)
        return DecodeTensors(numbers[_TOKEN].long(), numbers[_SOURCE].long(), positions.long(), metadata)


def batch_sizes(most: int) -> list[int]:
    """1, 2, 4, 8 and from there on in steps of 8, 16 and 32, so that padding stays below a quarter."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, most + 32, 32)]
    return [*(size for size in sizes if size < most), most]
