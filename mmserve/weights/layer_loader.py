"""From a checkpoint's tensors to layers."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from mmserve.attention.kv_scales import KVScales
from mmserve.config import VisionAttentionName
from mmserve.errors import SetupError
from mmserve.layers.embedding import BlockEmbedding, Embedding
from mmserve.layers.kernel_set import KernelSet, kernel_set
from mmserve.layers.linear import Linear
from mmserve.layers.norm import LayerNorm, RMSNorm
from mmserve.quantization.dense import dense_weight
from mmserve.quantization.gguf import grouped_ints, is_grouped
from mmserve.quantization.grouped import grouped_weight
from mmserve.quantization.scheme import LinearSpec, LinearWeight, Placement, QuantizationScheme, StackedWeights
from mmserve.weights.loader import WeightReader


@dataclass(frozen=True)
class LayerLoader:
    """Takes weights by name from `reader` and puts them on `device` in `dtype`, in the form that computes fastest."""

    reader: WeightReader
    dtype: torch.dtype
    device: torch.device
    vision_attention: VisionAttentionName = "auto"
    scheme: QuantizationScheme | None = None
    keeps_copy: bool = True
    is_small: bool = False

    @cached_property
    def kernels(self) -> KernelSet:
        """What the layers of this device compute with."""
        return kernel_set(self.device)

    @property
    def placement(self) -> Placement:
        return Placement(self.dtype, self.device, self.keeps_copy, self.is_small)

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """In full precision. `SetupError` for whole numbers: what they stand for, a scale would have to say."""
        tensor = self.reader.take(name, shape)
        if not tensor.is_floating_point():
            stored = str(tensor.dtype).removeprefix("torch.")
            raise SetupError(
                "model_unavailable",
                f"weight {name} is stored as {stored} without a scale, or in a form of quantization that is not served",
            )
        return tensor.to(self.device, self.dtype)

    def is_full_precision(self, module: str) -> bool:
        """Whether a module's matrix is stored as it is, so that `tensor` gives it."""
        return not any(self.reader.has(f"{module}.{part}") for part in ("weight_scale", "weight_scale_inv", "qweight"))

    def embedding(self, name: str, shape: tuple[int, int]) -> Embedding | BlockEmbedding:
        """In the blocks that a GGUF file has it in, where these can be unpacked row by row."""
        blocks = self.reader.take_quantized(f"{name}.weight", shape)
        if blocks is not None and is_grouped(blocks.type):
            return BlockEmbedding(blocks.data, blocks.type, self.placement)
        return Embedding(self.tensor(f"{name}.weight", shape))

    def norm(self, name: str, size: int, eps: float) -> RMSNorm:
        return RMSNorm(self.tensor(f"{name}.weight", (size,)), eps, self.kernels)

    def layer_norm(self, name: str, size: int, eps: float) -> LayerNorm:
        weight, bias = (self.tensor(f"{name}.{part}", (size,)) for part in ("weight", "bias"))
        return LayerNorm(weight, bias, eps, self.kernels)

    def kv_scales(self, prefix: str) -> KVScales:
        """Those of an FP8 cache, where the checkpoint has them beside the attention layer `prefix`."""
        found = {}
        for part in "kv":
            for name in (f"{part}_scale", f"{part}_proj.{part}_scale", "kv_scale"):
                if self.reader.has(f"{prefix}.{name}"):
                    found[part] = float(self.reader.take_any(f"{prefix}.{name}").float().max())
                    break
        return KVScales(**found, is_known=True) if len(found) == len("kv") else KVScales()

    def linear(self, names: Sequence[str], in_features: int, out_features: Sequence[int], *, bias: bool) -> Linear:
        """One layer out of several matrices with the same input, stacked by rows."""
        weight = self._weight(names, in_features, out_features)
        if not bias:
            return Linear(weight)
        biases = [self.tensor(f"{name}.bias", (size,)) for name, size in zip(names, out_features, strict=True)]
        return Linear(weight, torch.cat(biases))

    def _weight(self, names: Sequence[str], in_features: int, out_features: Sequence[int]) -> LinearWeight:
        placement = self.placement
        if len({self.is_full_precision(name) for name in names}) > 1:
            sizes = zip(names, out_features, strict=True)
            return StackedWeights([self._weight([name], in_features, [size]) for name, size in sizes])
        if self.scheme is not None:
            spec = LinearSpec(tuple(names), in_features, tuple(out_features))
            quantized = self.scheme.load(spec, self.reader, placement)
            if quantized is not None:
                return quantized
        shapes = {f"{name}.weight": (size, in_features) for name, size in zip(names, out_features, strict=True)}
        blocks = [self.reader.take_quantized(name, shape) for name, shape in shapes.items()]
        if all(block is not None and is_grouped(block.type) for block in blocks):
            return grouped_weight([grouped_ints(block.data, block.type) for block in blocks if block], placement)
        return dense_weight(torch.cat([self.tensor(name, shape) for name, shape in shapes.items()]))
