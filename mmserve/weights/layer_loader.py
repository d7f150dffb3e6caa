"""From a checkpoint's tensors to layers."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from mmserve.config import VisionAttentionName
from mmserve.layers.kernel_set import KernelSet, kernel_set
from mmserve.layers.linear import Linear, LinearWeight
from mmserve.layers.norm import LayerNorm, RMSNorm
from mmserve.quantization.dense import dense_weight
from mmserve.quantization.gguf import PackedInt4Weight, can_pack_int4
from mmserve.weights.loader import WeightReader


@dataclass(frozen=True)
class LayerLoader:
    """Takes weights by name from `reader` and puts them on `device` in `dtype`, in the form that computes fastest."""

    reader: WeightReader
    dtype: torch.dtype
    device: torch.device
    vision_attention: VisionAttentionName = "auto"

    @cached_property
    def kernels(self) -> KernelSet:
        """What the layers of this device compute with."""
        return kernel_set(self.device)

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self.reader.take(name, shape).to(self.device, self.dtype)

    def norm(self, name: str, size: int, eps: float) -> RMSNorm:
        return RMSNorm(self.tensor(f"{name}.weight", (size,)), eps, self.kernels)

    def layer_norm(self, name: str, size: int, eps: float) -> LayerNorm:
        weight, bias = (self.tensor(f"{name}.{part}", (size,)) for part in ("weight", "bias"))
        return LayerNorm(weight, bias, eps, self.kernels)

    def linear(self, names: Sequence[str], in_features: int, out_features: Sequence[int], *, bias: bool) -> Linear:
        """One layer out of several matrices with the same input, stacked by rows."""
        weight = self._weight(names, in_features, out_features)
        if not bias:
            return Linear(weight)
        biases = [self.tensor(f"{name}.bias", (size,)) for name, size in zip(names, out_features, strict=True)]
        return Linear(weight, torch.cat(biases))

    def _weight(self, names: Sequence[str], in_features: int, out_features: Sequence[int]) -> LinearWeight:
        shapes = {f"{name}.weight": (size, in_features) for name, size in zip(names, out_features, strict=True)}
        dense = torch.cat([self.tensor(name, shape) for name, shape in shapes.items()])
        blocks = [self.reader.take_quantized(name, shape) for name, shape in shapes.items()]
        kinds = {block.type if block else "" for block in blocks}
        if len(kinds) == 1 and can_pack_int4(kind := kinds.pop(), self.dtype, self.device, sum(out_features)):
            return PackedInt4Weight(torch.cat([block.data for block in blocks if block]), kind, dense)
        return dense_weight(dense)
