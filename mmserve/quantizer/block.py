"""A decoder's layer in plain float32, over whole samples, with its matrices' inputs in sight."""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from mmserve.config import ModelConfig
from mmserve.kernels.reference import rms_norm
from mmserve.layers.rotary import RotaryTable

Tensors = dict[str, torch.Tensor]
# What the matrices of a layer multiply: those of one input are scaled together.
INPUTS: Mapping[str, tuple[str, ...]] = {
    "attention": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention_output": ("self_attn.o_proj",),
    "feed_forward": ("mlp.gate_proj", "mlp.up_proj"),
    "feed_forward_output": ("mlp.down_proj",),
}
MATRICES = tuple(name for names in INPUTS.values() for name in names)
Rounding = Callable[[torch.Tensor], torch.Tensor]


def as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


@dataclass(frozen=True)
class MatrixInput:
    """What the matrices `group` of `INPUTS` multiply, `[N, S, in]`, and what their outputs are added to."""

    group: str
    x: torch.Tensor
    residual: torch.Tensor | None = None


class DecoderBlock:
    """`config`'s layer; positions are those of text, from 0.

    `product_dtype` is what matrices are multiplied in, the rest is float32; `rounding` is done to what they multiply.
    """

    def __init__(
        self,
        config: ModelConfig,
        seq_len: int,
        device: torch.device,
        *,
        product_dtype: torch.dtype = torch.float32,
        rounding: Rounding = as_it_is,
    ) -> None:
        self._config = config
        self._product_dtype = product_dtype
        self._rounding = rounding
        table = RotaryTable(
            config.rope, head_dim=config.head_dim, max_positions=seq_len, dtype=torch.float32, device=device
        )
        cos, sin = table.at(torch.arange(seq_len, device=device))
        self._cos, self._sin = cos[:, 0], sin[:, 0]

    def __call__(self, x: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        """`[N, S, hidden]` -> the same."""
        steps = self.steps(x, tensors)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                out: torch.Tensor = end.value
                return out

    def input_of(self, group: str, x: torch.Tensor, tensors: Tensors) -> MatrixInput:
        """Computes no further than to there."""
        return next(step for step in self.steps(x, tensors) if step.group == group)

    def steps(self, x: torch.Tensor, tensors: Tensors) -> Generator[MatrixInput, None, torch.Tensor]:
        """Each of `INPUTS`, before its matrices are used; the layer's outputs are what it returns."""
        normed = self._rounding(self._norm(x, tensors, "input_layernorm"))
        yield MatrixInput("attention", normed)
        attended = self._rounding(self._attention(normed, tensors))
        yield MatrixInput("attention_output", attended, x)
        x = x + self._linear(attended, tensors, "self_attn.o_proj")
        normed = self._rounding(self._norm(x, tensors, "post_attention_layernorm"))
        yield MatrixInput("feed_forward", normed)
        inner = F.silu(self._linear(normed, tensors, "mlp.gate_proj")) * self._linear(normed, tensors, "mlp.up_proj")
        inner = self._rounding(inner)
        yield MatrixInput("feed_forward_output", inner, x)
        return x + self._linear(inner, tensors, "mlp.down_proj")

    def _norm(self, x: torch.Tensor, tensors: Tensors, name: str) -> torch.Tensor:
        return rms_norm(x, tensors[f"{name}.weight"], self._config.rms_norm_eps)

    def _attention(self, x: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        config = self._config
        q, k, v = (
            self._linear(x, tensors, f"self_attn.{part}_proj").view(*x.shape[:2], -1, config.head_dim).transpose(1, 2)
            for part in "qkv"
        )
        if config.qk_norm:
            q, k = self._norm(q, tensors, "self_attn.q_norm"), self._norm(k, tensors, "self_attn.k_norm")
        q, k = self._rotated(q), self._rotated(k)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        # The table's sines are negative where the halves change places.
        return x * self._cos + x.roll(x.shape[-1] // 2, dims=-1) * self._sin

    def _linear(self, x: torch.Tensor, tensors: Tensors, name: str) -> torch.Tensor:
        weight, bias = tensors[f"{name}.weight"], tensors.get(f"{name}.bias")
        product = F.linear(x.to(self._product_dtype), weight.to(self._product_dtype)).float()
        return product if bias is None else product + bias
