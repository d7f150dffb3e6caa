"""What comes into a layer's matrices when the model reads the calibration samples, and what comes out of the layer."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from mmserve.quantizer.block import INPUTS, DecoderBlock, Tensors
from mmserve.quantizer.states import HiddenStates
from mmserve.quantizer.statistics import InputStatistics

# Tokens that are computed together.
_BATCH_TOKENS = 4096


@dataclass(frozen=True)
class LayerInputs:
    """`states` are those of the model whose layers before are quantized, `wanted` those of the float model.

    Nothing is kept between two calls but the files: each computes anew what it needs, batch by batch.
    """

    tensors: Tensors
    states: HiddenStates
    wanted: HiddenStates
    block: DecoderBlock
    float_block: DecoderBlock
    device: torch.device

    def of_unquantized(self) -> Mapping[str, InputStatistics]:
        """By `INPUTS`: what the matrices get as long as none of this layer is quantized."""
        statistics = {group: self._empty(group) for group in INPUTS}
        for rows in self._batches():
            for step in self.block.steps(self._read(self.states, rows), self.tensors):
                statistics[step.group].add(step.x)
        return statistics

    def of(self, group: str, layer: Tensors) -> InputStatistics:
        """What `group` gets from `layer`, whose matrices before it are quantized, and how far off that is."""
        statistics = self._empty(group)
        for rows in self._batches():
            step = self.block.input_of(group, self._read(self.states, rows), layer)
            wanted = self.float_block.input_of(group, self._read(self.wanted, rows), self.tensors)
            residual_change = None
            if step.residual is not None and wanted.residual is not None:
                residual_change = wanted.residual - step.residual
            statistics.add(step.x, wanted.x - step.x, residual_change)
        return statistics

    def write_outputs(self, layer: Tensors, states: HiddenStates, wanted: HiddenStates) -> None:
        """Of the finished `layer`, and of what it was, for the layer after it."""
        for rows in self._batches():
            states.tensor[rows] = self.block(self._read(self.states, rows), layer).cpu()
            wanted.tensor[rows] = self.float_block(self._read(self.wanted, rows), self.tensors).cpu()

    def _empty(self, group: str) -> InputStatistics:
        return InputStatistics.empty(self.tensors[f"{INPUTS[group][0]}.weight"].shape[1], self.device)

    def _batches(self) -> Iterator[slice]:
        num_samples, seq_len, _ = self.states.tensor.shape
        size = max(_BATCH_TOKENS // seq_len, 1)
        for start in range(0, num_samples, size):
            yield slice(start, start + size)

    def _read(self, states: HiddenStates, rows: slice) -> torch.Tensor:
        return states.tensor[rows].to(self.device)
