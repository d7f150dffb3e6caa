"""What the towers of CLIP and SigLIP have in common: patches of pictures of one size, and a plain transformer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mmserve.errors import SetupError
from mmserve.layers.linear import Linear
from mmserve.quantization.dense import dense_weight
from mmserve.vision.attention import PackedSelfAttention
from mmserve.vision.attention_backends import Attend, vision_attention
from mmserve.vision.feed_forward import FeedForwardNames, VitFeedForward
from mmserve.weights.layer_loader import LayerLoader


@dataclass(frozen=True, kw_only=True)
class VitConfig:
    """A tower's shape, under the names of Hugging Face's `vision_config`."""

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_channels: int = 3
    image_size: int = 224
    patch_size: int
    hidden_act: str
    layer_norm_eps: float

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    def updated(self, vision: Mapping[str, Any]) -> "VitConfig":
        """With what a `vision_config` says otherwise; it may leave out whatever is as usual."""
        return replace(self, **{name: vision[name] for name in self.__dataclass_fields__ if name in vision})


def hidden_state_numbers(selected: int | Sequence[int], num_layers: int) -> tuple[int, ...]:
    """`vision_feature_layer` as numbers of hidden states: 0 enters the first layer, `num_layers` leaves the last.

    Negative ones count from the end. `SetupError` for one that the tower does not have.
    """
    numbers = [selected] if isinstance(selected, int) else list(selected)
    for number in numbers:
        if not -num_layers - 1 <= number <= num_layers:
            raise SetupError(
                "model_unavailable",
                f"vision_feature_layer {number} of config.json is not there: the vision tower has {num_layers} layers",
            )
    return tuple(number % (num_layers + 1) for number in numbers)


class PatchEmbedding:
    """A convolution whose stride is its kernel: a matrix product over flat patches."""

    def __init__(self, loader: LayerLoader, name: str, config: VitConfig, *, bias: bool) -> None:
        self._size = config.patch_size
        shape = (config.hidden_size, config.num_channels, self._size, self._size)
        weight = dense_weight(loader.tensor(f"{name}.weight", shape).flatten(1))
        self._linear = Linear(weight, loader.tensor(f"{name}.bias", (config.hidden_size,)) if bias else None)

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """`[N, channels, height, width]` -> `[N, patches, hidden]`; pixels beyond whole patches are left out."""
        patches = pixels.unfold(2, self._size, self._size).unfold(3, self._size, self._size)
        flat = patches.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        return self._linear(flat.flatten(0, 1)).view(*flat.shape[:2], -1)


class VitLayer:
    def __init__(self, loader: LayerLoader, prefix: str, config: VitConfig) -> None:
        hidden, inner, eps = config.hidden_size, config.intermediate_size, config.layer_norm_eps
        qkv = loader.linear([f"{prefix}.self_attn.{part}_proj" for part in "qkv"], hidden, [hidden] * 3, bias=True)
        out = loader.linear([f"{prefix}.self_attn.out_proj"], hidden, (hidden,), bias=True)
        self._attention = PackedSelfAttention(qkv, out, config.num_attention_heads, loader.kernels)
        names = FeedForwardNames([f"{prefix}.mlp.fc1"], f"{prefix}.mlp.fc2")
        self._feed_forward = VitFeedForward(loader, names, hidden, inner, config.hidden_act)
        self._norm1 = loader.layer_norm(f"{prefix}.layer_norm1", hidden, eps)
        self._norm2 = loader.layer_norm(f"{prefix}.layer_norm2", hidden, eps)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What comes out, and what is to be added to it: each norm adds what the layer before it left."""
        normed, residual = (self._norm1(x), x) if residual is None else self._norm1.add(x, residual)
        normed, residual = self._norm2.add(self._attention(normed, attend), residual)
        return self._feed_forward(normed), residual


class VitLayers:
    """As many of the tower's layers as `hidden_states`, those that are wanted, take; the others are not loaded."""

    def __init__(self, loader: LayerLoader, prefix: str, config: VitConfig, hidden_states: Sequence[int]) -> None:
        self._hidden_states = tuple(hidden_states)
        self._attention = vision_attention(loader.vision_attention, loader.device)
        names = [f"{prefix}.encoder.layers.{i}" for i in range(config.num_hidden_layers)]
        depth = max(hidden_states)
        self._layers = [VitLayer(loader, name, config) for name in names[:depth]]
        for name in names[depth:]:
            loader.reader.leave(f"{name}.")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[N, tokens, hidden]` of N pictures -> the hidden states side by side, `[N, tokens, hidden * states]`."""
        attend = self._attention.over([x.shape[1]] * x.shape[0])
        packed, residual = x.flatten(0, 1), None
        states = {0: packed}
        for number, layer in enumerate(self._layers, start=1):
            packed, residual = layer(packed, residual, attend)
            if number in self._hidden_states:
                states[number] = residual + packed
        wanted = [states[number] for number in self._hidden_states]
        return (wanted[0] if len(wanted) == 1 else torch.cat(wanted, dim=1)).view(*x.shape[:2], -1)
