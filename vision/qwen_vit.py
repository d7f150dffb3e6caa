"""The vision encoders of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: one transformer over packed images, `QwenVitConfig` says
what differs.

Qwen2-VL: Wang et al. 2024 (arXiv 2409.12191); Qwen2.5-VL, with attention in windows: Bai et al. 2025 (2502.13923);
Qwen3-VL, with learned positions beside the rotary ones, and features of inner layers for the decoder (DeepStack, Meng
et al. 2024): Bai et al. 2025 (2511.21631).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from mmserve.kernels.transfer import to_device
from mmserve.layers.linear import Linear
from mmserve.layers.norm import LayerNorm, RMSNorm
from mmserve.quantization.dense import dense_weight
from mmserve.vision.attention import PackedSelfAttention, Rotary
from mmserve.vision.attention_backends import Attend, vision_attention
from mmserve.vision.feed_forward import FeedForwardNames, VitFeedForward
from mmserve.vision.patches import PixelPatches
from mmserve.vision.qwen_grid import interpolation_taps, pack_grids
from mmserve.weights.layer_loader import LayerLoader

_NORM_EPS = 1e-6
# Batches of pages mostly have the same shapes; two pages of A4 at 150 dpi take 15 MB here.
_PLANS_KEPT = 8


@dataclass(frozen=True, kw_only=True)
class QwenVitConfig:
    """The encoder's shape.

    `window` is a window's side in merged tokens, outside the layers of `full_layers`; None for no windows.
    `position_table_side` is 0 where there are no learned positions.
    """

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    patch_size: int
    activation: str
    temporal_patch_size: int = 2
    in_channels: int = 3
    merge: int = 2
    rope_theta: float = 10000.0
    patch_bias: bool = False
    rms_norm: bool = False
    gated: bool = False
    window: int | None = None
    full_layers: frozenset[int] = frozenset()
    position_table_side: int = 0
    deepstack_layers: tuple[int, ...] = ()

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @classmethod
    def from_hf(cls, model_type: str, vision: Mapping[str, Any]) -> "QwenVitConfig":
        """From a checkpoint's `vision_config`; what is absent has the family's published value."""
        return _READERS[model_type](vision)


def _common(vision: Mapping[str, Any], **defaults: Any) -> dict[str, Any]:
    known = {**defaults, **{key: value for key, value in vision.items() if value is not None}}
    return {
        "depth": known.get("depth", 32),
        "num_heads": known.get("num_heads", 16),
        "patch_size": known["patch_size"],
        "activation": known["hidden_act"],
        "temporal_patch_size": known.get("temporal_patch_size", 2),
        "in_channels": known.get("in_channels", 3),
        "merge": known.get("spatial_merge_size", 2),
        "rope_theta": float(known.get("rope_parameters", {}).get("rope_theta", 10000.0)),
    }


def _qwen2(vision: Mapping[str, Any]) -> QwenVitConfig:
    hidden_size = vision.get("embed_dim", 1280)
    return QwenVitConfig(
        **_common(vision, patch_size=14, hidden_act="quick_gelu"),
        hidden_size=hidden_size,
        intermediate_size=int(hidden_size * vision.get("mlp_ratio", 4)),
        out_hidden_size=vision.get("hidden_size", 3584),
    )


def _qwen2_5(vision: Mapping[str, Any]) -> QwenVitConfig:
    common = _common(vision, patch_size=14, hidden_act="silu")
    return QwenVitConfig(
        **common,
        hidden_size=vision.get("hidden_size", 3584),
        intermediate_size=vision.get("intermediate_size", 3420),
        out_hidden_size=vision.get("out_hidden_size", 3584),
        rms_norm=True,
        gated=True,
        window=vision.get("window_size", 112) // common["merge"] // common["patch_size"],
        full_layers=frozenset(vision.get("fullatt_block_indexes", (7, 15, 23, 31))),
    )


def _qwen3(vision: Mapping[str, Any]) -> QwenVitConfig:
    return QwenVitConfig(
        **_common({"depth": 27, **vision}, patch_size=16, hidden_act="gelu_pytorch_tanh"),
        hidden_size=vision.get("hidden_size", 1152),
        intermediate_size=vision.get("intermediate_size", 4304),
        out_hidden_size=vision.get("out_hidden_size", 3584),
        patch_bias=True,
        position_table_side=int(vision.get("num_position_embeddings", 2304) ** 0.5),
        deepstack_layers=tuple(vision.get("deepstack_visual_indexes", (8, 16, 24))),
    )


_READERS: Mapping[str, Callable[[Mapping[str, Any]], QwenVitConfig]] = {
    "qwen2_vl": _qwen2,
    "qwen2_5_vl": _qwen2_5,
    "qwen3_vl": _qwen3,
}


class VitLayer:
    def __init__(self, loader: LayerLoader, prefix: str, config: QwenVitConfig, names: tuple[str, str]) -> None:
        hidden = config.hidden_size
        qkv = loader.linear([f"{prefix}.attn.qkv"], hidden, (3 * hidden,), bias=True)
        out = loader.linear([f"{prefix}.attn.proj"], hidden, (hidden,), bias=True)
        self._attention = PackedSelfAttention(qkv, out, config.num_heads, loader.kernels)
        mlp_names = _feed_forward_names(f"{prefix}.mlp", config, names)
        self._feed_forward = VitFeedForward(loader, mlp_names, hidden, config.intermediate_size, config.activation)
        self._norm1 = _norm(loader, f"{prefix}.norm1", hidden, config)
        self._norm2 = _norm(loader, f"{prefix}.norm2", hidden, config)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, attend: Attend, rotary: Rotary
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What comes out, and what is to be added to it: each norm adds what the layer before it left."""
        normed, residual = (self._norm1(x), x) if residual is None else self._norm1.add(x, residual)
        normed, residual = self._norm2.add(self._attention(normed, attend, rotary), residual)
        return self._feed_forward(normed), residual


@dataclass(frozen=True)
class MergerNames:
    norm: str
    first: str
    second: str


class PatchMerger:
    """`merge` x `merge` neighbouring patches become one token of the decoder's size."""

    def __init__(
        self, loader: LayerLoader, prefix: str, config: QwenVitConfig, names: MergerNames, *, norm_after: bool = False
    ) -> None:
        self._merged_size = config.hidden_size * config.merge**2
        self._norm_after = norm_after
        norm_size = self._merged_size if norm_after else config.hidden_size
        self._norm = _norm(loader, f"{prefix}.{names.norm}", norm_size, config)
        self._first = loader.linear([f"{prefix}.{names.first}"], self._merged_size, (self._merged_size,), bias=True)
        self._second = loader.linear(
            [f"{prefix}.{names.second}"], self._merged_size, (config.out_hidden_size,), bias=True
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[N, hidden]` -> `[N / merge^2, out_hidden]`."""
        merged = x.view(-1, self._merged_size)
        normed = self._norm(merged) if self._norm_after else self._norm(x).view(-1, self._merged_size)
        return self._second(F.gelu(self._first(normed)))


@dataclass(frozen=True)
class BatchPlan:
    """What follows from the shapes of a batch of images, on the device; blocks are of merge x merge patches.

    `order`: which block is computed i-th; `inverse`: when the i-th block is computed. `taps`: rows of the table of
    learned positions and their weights, `[4, N]` each.
    """

    order: torch.Tensor
    inverse: torch.Tensor
    rotary: Rotary
    in_windows: Attend
    in_images: Attend
    num_tokens: tuple[int, ...]
    taps: tuple[torch.Tensor, torch.Tensor] | None


class QwenVit:
    """Patches of any number of images in, tokens of the decoder out."""

    def __init__(self, loader: LayerLoader, config: QwenVitConfig) -> None:
        learned = config.position_table_side > 0
        names = ("linear_fc1", "linear_fc2") if learned else ("fc1", "fc2")
        merger_names = MergerNames("norm", *names) if learned else MergerNames("ln_q", "mlp.0", "mlp.2")
        self._config, self._dtype, self._device = config, loader.dtype, loader.device
        self._attention = vision_attention(loader.vision_attention, loader.device)
        self._plan = lru_cache(maxsize=_PLANS_KEPT)(self._make_plan)
        self._patch_embedding = _patch_embedding(loader, "vision.patch_embed.proj", config)
        self._position_table = None
        if learned:
            shape = (config.position_table_side**2, config.hidden_size)
            self._position_table = loader.tensor("vision.pos_embed.weight", shape)
        self._layers = [VitLayer(loader, f"vision.blocks.{i}", config, names) for i in range(config.depth)]
        self._merger = PatchMerger(loader, "vision.merger", config, merger_names)
        self._deepstack_mergers = {
            layer: PatchMerger(loader, f"vision.deepstack_merger_list.{i}", config, merger_names, norm_after=True)
            for i, layer in enumerate(config.deepstack_layers)
        }

    def __call__(self, images: Sequence[PixelPatches]) -> list[torch.Tensor]:
        """Pixels `[N, channels * time * patch^2]` with layout (1, rows, columns) -> `[N / merge^2, out_hidden]` each.

        With deepstack, the features of its layers stand after the tokens, side by side.
        """
        plan = self._plan(tuple(_rows_and_columns(image) for image in images))
        pixels = torch.cat([image.pixels.to(self._device, self._dtype) for image in images])
        x = self._patch_embedding(_in_order(pixels, plan.order, self._config.merge))
        if self._position_table is not None and plan.taps is not None:
            x = x + _interpolated(self._position_table, *plan.taps).to(self._dtype)
        restored = self._encode(x, plan).index_select(0, plan.inverse)
        return list(torch.split(restored, list(plan.num_tokens)))

    def _encode(self, x: torch.Tensor, plan: BatchPlan) -> torch.Tensor:
        """Merged tokens of all images, in the order of computation."""
        residual: torch.Tensor | None = None
        deepstack = []
        for i, layer in enumerate(self._layers):
            in_windows = self._config.window is not None and i not in self._config.full_layers
            x, residual = layer(x, residual, plan.in_windows if in_windows else plan.in_images, plan.rotary)
            if i in self._deepstack_mergers:
                deepstack.append(self._deepstack_mergers[i](residual + x))
        hidden = x if residual is None else residual + x
        return torch.cat((self._merger(hidden), *deepstack), dim=1)

    def _make_plan(self, shapes: tuple[tuple[int, int], ...]) -> BatchPlan:
        config = self._config
        grids = pack_grids(shapes, config.merge, config.window, self._device)
        taps = None
        if self._position_table is not None:
            each = [interpolation_taps(*shape, config.merge, config.position_table_side) for shape in shapes]
            parts = (torch.cat(part, dim=1).numpy() for part in zip(*each, strict=True))
            indices, weights = (to_device(part, self._device) for part in parts)
            taps = indices, weights
        return BatchPlan(
            grids.order,
            torch.argsort(grids.order),
            self._rotary(grids.positions),
            self._attention.over(grids.window_lengths),
            self._attention.over(grids.image_lengths),
            tuple(length // config.merge**2 for length in grids.image_lengths),
            taps,
        )

    def _rotary(self, positions: torch.Tensor) -> Rotary:
        """cos and sin `[N, 1, D]`: a quarter of each head turns with the row, a quarter with the column, twice."""
        size = self._config.head_dim // 2
        exponents = torch.arange(0, size, 2, dtype=torch.float32, device=self._device) / size
        angles = (positions[:, :, None] * self._config.rope_theta**-exponents).flatten(1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), dim=1)[:, None], torch.cat((-sin, sin), dim=1)[:, None]


def _interpolated(table: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Rows of the table at four corners, `[4, N]`, by their weights -> `[N, hidden]` in float32."""
    x = torch.zeros((), device=table.device)
    for corner in range(4):
        x = x + table.index_select(0, indices[corner]).float() * weights[corner][:, None]
    return x


def _feed_forward_names(prefix: str, config: QwenVitConfig, names: tuple[str, str]) -> FeedForwardNames:
    if config.gated:
        return FeedForwardNames([f"{prefix}.gate_proj", f"{prefix}.up_proj"], f"{prefix}.down_proj")
    return FeedForwardNames([f"{prefix}.{names[0]}"], f"{prefix}.{names[1]}")


def _patch_embedding(loader: LayerLoader, name: str, config: QwenVitConfig) -> Linear:
    """A convolution whose stride is its kernel is a matrix product over flat patches."""
    patch = (config.in_channels, config.temporal_patch_size, config.patch_size, config.patch_size)
    weight = loader.tensor(f"{name}.weight", (config.hidden_size, *patch)).flatten(1)
    bias = loader.tensor(f"{name}.bias", (config.hidden_size,)) if config.patch_bias else None
    return Linear(dense_weight(weight), bias)


def _norm(loader: LayerLoader, name: str, size: int, config: QwenVitConfig) -> RMSNorm | LayerNorm:
    return loader.norm(name, size, _NORM_EPS) if config.rms_norm else loader.layer_norm(name, size, _NORM_EPS)


def _rows_and_columns(image: PixelPatches) -> tuple[int, int]:
    frames, rows, columns = image.layout
    assert frames == 1, "a picture, not a film"
    return rows, columns


def _in_order(pixels: torch.Tensor, order: torch.Tensor, merge: int) -> torch.Tensor:
    """Move whole blocks of merge x merge patches."""
    return pixels.view(-1, merge * merge, pixels.shape[1]).index_select(0, order).flatten(0, 1)
