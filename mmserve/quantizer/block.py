"""A decoder's layer in plain float32, over whole samples, with its matrices' inputs in sight."""

from collections.abc import Callable, Mapping

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
Watch = Callable[[str, torch.Tensor], None]


def _unwatched(_name: str, _x: torch.Tensor) -> None: ...


class DecoderBlock:
    """`config`'s layer; positions are those of text, from 0."""

    def __init__(self, config: ModelConfig, seq_len: int, device: torch.device) -> None:
        self._config = config
        table = RotaryTable(
            config.rope, head_dim=config.head_dim, max_positions=seq_len, dtype=torch.float32, device=device
        )
        cos, sin = table.at(torch.arange(seq_len, device=device))
        self._cos, self._sin = cos[:, 0], sin[:, 0]

    def __call__(self, x: torch.Tensor, tensors: Tensors, watch: Watch = _unwatched) -> torch.Tensor:
        """`[N, S, hidden]` -> the same; `watch` gets each of `INPUTS` `[N, S, in]`."""
        normed = self._norm(x, tensors, "input_layernorm")
        watch("attention", normed)
        attended = self._attention(normed, tensors)
        watch("attention_output", attended)
        x = x + _linear(attended, tensors, "self_attn.o_proj")
        normed = self._norm(x, tensors, "post_attention_layernorm")
        watch("feed_forward", normed)
        inner = F.silu(_linear(normed, tensors, "mlp.gate_proj")) * _linear(normed, tensors, "mlp.up_proj")
        watch("feed_forward_output", inner)
        return x + _linear(inner, tensors, "mlp.down_proj")

    def _norm(self, x: torch.Tensor, tensors: Tensors, name: str) -> torch.Tensor:
        return rms_norm(x, tensors[f"{name}.weight"], self._config.rms_norm_eps)

    def _attention(self, x: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        config = self._config
        q, k, v = (
            _linear(x, tensors, f"self_attn.{part}_proj").view(*x.shape[:2], -1, config.head_dim).transpose(1, 2)
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


def _linear(x: torch.Tensor, tensors: Tensors, name: str) -> torch.Tensor:
    return F.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))
