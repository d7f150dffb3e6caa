"""What comes into a layer's matrices when the model reads the calibration samples, and what comes out of the layer."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from mmserve.quantizer.block import ADDED, INPUTS, DecoderBlock, LayerState, Tensors
from mmserve.quantizer.states import HiddenStates
from mmserve.quantizer.statistics import InputStatistics

# Tokens that are computed together.
_BATCH_TOKENS = 4096


def batches_of(num_samples: int, seq_len: int) -> Iterator[slice]:
    """Samples that are computed together."""
    size = max(_BATCH_TOKENS // seq_len, 1)
    for start in range(0, num_samples, size):
        yield slice(start, start + size)


@dataclass
class Stream:
    """All samples on their way through one layer, in files: from `before` to `after`, batch by batch.

    Half-way, `after` has what goes past the matrices, and `between`, as wide as the widest of them, what they multiply.
    """

    block: DecoderBlock
    before: HiddenStates
    after: HiddenStates
    between: HiddenStates
    device: torch.device

    def batches(self) -> Iterator[slice]:
        return batches_of(*self.before.tensor.shape[:2])

    def started(self, rows: slice, layer: Tensors) -> LayerState:
        return self._kept(rows, self.block.start(self._read(self.before, rows), layer))

    def advanced(self, rows: slice, group: str, layer: Tensors) -> LayerState:
        """Past the matrices of `group`, where the last call has left off."""
        return self._kept(rows, self.block.advance(self._state(rows, group, layer), layer))

    def finish(self, rows: slice, group: str, layer: Tensors) -> None:
        self.after.tensor[rows] = self.block.finish(self._state(rows, group, layer), layer).cpu()

    def pass_through(self, rows: slice, layer: Tensors) -> None:
        """The whole layer at once."""
        self.after.tensor[rows] = self.block(self._read(self.before, rows), layer).cpu()

    def _kept(self, rows: slice, state: LayerState) -> LayerState:
        self.between.tensor[rows, :, : state.inputs.shape[-1]] = state.inputs.cpu()
        self.after.tensor[rows] = state.x.cpu()
        return state

    def _state(self, rows: slice, group: str, layer: Tensors) -> LayerState:
        width = layer[f"{INPUTS[group][0]}.weight"].shape[1]
        inputs = self.between.tensor[rows, :, :width].to(self.device)
        return LayerState(group, inputs, self._read(self.after, rows))

    def _read(self, states: HiddenStates, rows: slice) -> torch.Tensor:
        return states.tensor[rows].to(self.device)


class LayerInputs:
    """`stream` is of the model whose layers before are quantized, `wanted` of the float model, where it is needed.

    `tensors` are the layer's before it is quantized.
    """

    def __init__(self, tensors: Tensors, stream: Stream, wanted: Stream | None) -> None:
        self._tensors = tensors
        self._stream = stream
        self._wanted = wanted
        self._group: str | None = None

    def of_unquantized(self) -> Mapping[str, InputStatistics]:
        """By `INPUTS`: what the matrices get as long as none of this layer is quantized."""
        statistics = {group: self._empty(group) for group in INPUTS}
        for rows in self._stream.batches():
            state = self._stream.started(rows, self._tensors)
            statistics[state.group].add(state.inputs)
            for group in list(INPUTS)[:-1]:
                state = self._stream.advanced(rows, group, self._tensors)
                statistics[state.group].add(state.inputs)
        return statistics

    def of_next(self, layer: Tensors) -> InputStatistics:
        """What the next group of `INPUTS` gets from `layer`, whose matrices before it are quantized.

        With the float model beside it, also how far that is off.
        """
        left, self._group = self._group, _following(self._group)
        statistics = self._empty(self._group)
        for rows in self._stream.batches():
            state = _moved(self._stream, rows, left, layer)
            if self._wanted is None:
                statistics.add(state.inputs)
                continue
            wanted = _moved(self._wanted, rows, left, self._tensors)
            residual_change = wanted.x - state.x if state.group in ADDED else None
            statistics.add(state.inputs, wanted.inputs - state.inputs, residual_change)
        return statistics

    def write_outputs(self, layer: Tensors) -> None:
        """Of the finished `layer`, and of what it was, for the layer after it."""
        for stream, tensors in ((self._stream, layer), (self._wanted, self._tensors)):
            if stream is None:
                continue
            for rows in stream.batches():
                if self._group is None:
                    stream.pass_through(rows, tensors)
                else:
                    stream.finish(rows, self._group, tensors)

    def _empty(self, group: str) -> InputStatistics:
        weight = self._tensors[f"{INPUTS[group][0]}.weight"]
        return InputStatistics.empty(weight.shape[1], weight.device)


def _following(group: str | None) -> str:
    names = list(INPUTS)
    return names[0 if group is None else names.index(group) + 1]


def _moved(stream: Stream, rows: slice, left: str | None, layer: Tensors) -> LayerState:
    return stream.started(rows, layer) if left is None else stream.advanced(rows, left, layer)
