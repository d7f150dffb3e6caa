"""Which matrices are kept in full precision where the rest has eight bits: the few whose rounding does most harm.

The harm is measured in one layer at a time: how far the hidden state that it leaves is off when one group of matrices,
and what they multiply, are rounded. Of SmolLM2-135M's harm three tenths are in a tenth of its weights, the feed-forward
parts of the first and the last layer above all.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch

from mmserve.quantizer.block import INPUTS, LAST_GROUP, DecoderBlock, LayerState, Rounding, Tensors
from mmserve.quantizer.rounding import Form, round_to_nearest

# A layer's number, and one of `INPUTS`: matrices that are multiplied as one are kept together.
Group = tuple[int, str]


class LayerHarm:
    """Summed up over batches of tokens; `block` is the float model's layer, `rounding` what inputs are subjected to."""

    def __init__(self, block: DecoderBlock, tensors: Tensors, form: Form, rounding: Rounding) -> None:
        self._block = block
        self._tensors = tensors
        self._rounding = rounding
        self._rounded = {
            group: {f"{name}.weight": round_to_nearest(tensors[f"{name}.weight"], form).dequantized() for name in names}
            for group, names in INPUTS.items()
        }
        self._sums = dict.fromkeys(INPUTS, 0.0)

    def add(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's outputs for `x` `[N, S, hidden]`, nothing rounded."""
        states = [self._block.start(x, self._tensors)]
        while states[-1].group != LAST_GROUP:
            states.append(self._block.advance(states[-1], self._tensors))
        outputs = self._block.finish(states[-1], self._tensors)
        lengths = outputs.square().sum(-1).clamp(min=torch.finfo(torch.float32).tiny)
        for state in states:
            change = self._outputs_after_rounding(state) - outputs
            # By token: the first one's state is often a thousand times the others'.
            self._sums[state.group] += float((change.square().sum(-1) / lengths).sum())
        return outputs

    def sizes(self) -> Mapping[str, int]:
        """Weights of each group."""
        return {group: sum(weight.numel() for weight in rounded.values()) for group, rounded in self._rounded.items()}

    def by_group(self) -> Mapping[str, float]:
        return self._sums

    def _outputs_after_rounding(self, state: LayerState) -> torch.Tensor:
        tensors = {**self._tensors, **self._rounded[state.group]}
        state = replace(state, inputs=self._rounding(state.inputs))
        while state.group != LAST_GROUP:
            state = self._block.advance(state, tensors)
        return self._block.finish(state, tensors)


def choose_kept(harm: Mapping[Group, float], sizes: Mapping[str, int], share: float) -> list[Group]:
    """Those with the most harm for their `sizes`, as long as they are not more than a `share` of all weights."""
    room = share * sum(sizes[name] for _, name in harm)
    kept: list[Group] = []
    for group in sorted(harm, key=lambda one: (-harm[one] / sizes[one[1]], one)):
        if sizes[group[1]] <= room:
            room -= sizes[group[1]]
            kept.append(group)
    return kept
