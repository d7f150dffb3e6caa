"""A decoder's layer in plain float32, over whole samples, with its matrices' inputs in sight."""

from collections.abc import Callable, Container, Mapping
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
# Groups whose outputs are added to what goes past them.
ADDED = frozenset({"attention_output", "feed_forward_output"})
LAST_GROUP = "feed_forward_output"
Rounding = Callable[[torch.Tensor], torch.Tensor]


def as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


@dataclass(frozen=True)
class LayerState:
    """Half-way through a layer: `inputs` `[N, S, in]` are what the matrices `group` of `INPUTS` multiply next.

    `x` `[N, S, hidden]` is what goes past them, and what outputs are added to.
    """

    group: str
    inputs: torch.Tensor
    x: torch.Tensor


class DecoderBlock:
    """`config`'s layer; positions are those of text, from 0.

    `product_dtype` is what matrices are multiplied in, the rest is float32; `rounding` is done to what they multiply,
    but for those of `kept`, groups of `INPUTS`.
    """

    def __init__(
        self,
        config: ModelConfig,
        seq_len: int,
        device: torch.device,
        *,
        product_dtype: torch.dtype = torch.float32,
        rounding: Rounding = as_it_is,
        kept: Container[str] = (),
    ) -> None:
        self._config = config
        self._product_dtype = product_dtype
        self._rounding = rounding
        self._kept = kept
        table = RotaryTable(
            config.rope, head_dim=config.head_dim, max_positions=seq_len, dtype=torch.float32, device=device
        )
        cos, sin = table.at(torch.arange(seq_len, device=device))
        self._cos, self._sin = cos[:, 0], sin[:, 0]

    def __call__(self, x: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        """`[N, S, hidden]` -> the same."""
        state = self.start(x, tensors)
        while state.group != LAST_GROUP:
            state = self.advance(state, tensors)
        return self.finish(state, tensors)

    def start(self, x: torch.Tensor, tensors: Tensors) -> LayerState:
        return self._state("attention", self._norm(x, tensors, "input_layernorm"), x)

    def advance(self, state: LayerState, tensors: Tensors) -> LayerState:
        """Past the matrices of `state.group`, which is not the last, to the next group."""
        inputs, x = state.inputs, state.x
        if state.group == "attention":
            return self._state("attention_output", self._attention(inputs, tensors), x)
        if state.group == "attention_output":
            x = x + self._linear(inputs, tensors, "self_attn.o_proj")
            return self._state("feed_forward", self._norm(x, tensors, "post_attention_layernorm"), x)
        gate = F.silu(self._linear(inputs, tensors, "mlp.gate_proj"))
        return self._state(LAST_GROUP, gate * self._linear(inputs, tensors, "mlp.up_proj"), x)

    def finish(self, state: LayerState, tensors: Tensors) -> torch.Tensor:
        return state.x + self._linear(state.inputs, tensors, "mlp.down_proj")

    def _state(self, group: str, inputs: torch.Tensor, x: torch.Tensor) -> LayerState:
        return LayerState(group, inputs if group in self._kept else self._rounding(inputs), x)

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
