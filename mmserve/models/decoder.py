"""The decoder that Llama, Mistral, SmolLM2, Qwen2, Qwen2.5 and Qwen3 share; `ModelConfig` says what differs.

Llama: Touvron et al. 2023; grouped queries: Ainslie et al. 2023; Qwen2's biases on q, k and v: Yang et al. 2024;
Qwen3's norms on the heads of q and k: Yang et al. 2025.
"""

from collections.abc import Sequence

import torch

from mmserve.attention.base import AttentionBackend, AttentionLayer
from mmserve.attention.context import ForwardContext
from mmserve.config import ModelConfig
from mmserve.layers.linear import Linear
from mmserve.weights.layer_loader import LayerLoader


class Attention:
    def __init__(self, loader: LayerLoader, prefix: str, config: ModelConfig, layer: int) -> None:
        self._head_dim = config.head_dim
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        names = [f"{prefix}.{part}_proj" for part in "qkv"]
        self._qkv = loader.linear(names, config.hidden_size, (q_size, kv_size, kv_size), bias=config.qkv_bias)
        self._out = loader.linear([f"{prefix}.o_proj"], q_size, (config.hidden_size,), bias=config.o_bias)
        q_norm, k_norm = (
            loader.tensor(f"{prefix}.{part}_norm.weight", (config.head_dim,)) if config.qk_norm else None
            for part in "qk"
        )
        scales = loader.kv_scales(prefix)
        self._layer = AttentionLayer(layer, config.num_heads, q_norm, k_norm, config.rms_norm_eps, scales)

    def __call__(self, x: torch.Tensor, backend: AttentionBackend, context: ForwardContext) -> torch.Tensor:
        qkv = self._qkv(x).view(x.shape[0], -1, self._head_dim)
        return self._out(backend.forward(qkv, self._layer, context).view(x.shape[0], -1))


class FeedForward:
    def __init__(self, loader: LayerLoader, prefix: str, config: ModelConfig) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        self._gate_up = loader.linear(names, hidden, (inner, inner), bias=config.mlp_bias)
        self._down = loader.linear([f"{prefix}.down_proj"], inner, (hidden,), bias=config.mlp_bias)
        self._kernels = loader.kernels

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._down(self._kernels.silu_and_mul(self._gate_up(x)))


class DecoderLayer:
    def __init__(self, loader: LayerLoader, prefix: str, config: ModelConfig, layer: int) -> None:
        self._attention = Attention(loader, f"{prefix}.self_attn", config, layer)
        self._feed_forward = FeedForward(loader, f"{prefix}.mlp", config)
        self._input_norm = loader.norm(f"{prefix}.input_layernorm", config.hidden_size, config.rms_norm_eps)
        self._post_norm = loader.norm(f"{prefix}.post_attention_layernorm", config.hidden_size, config.rms_norm_eps)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, backend: AttentionBackend, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What comes out, and what is to be added to it: each norm adds what the layer before it left."""
        normed, residual = (self._input_norm(x), x) if residual is None else self._input_norm.add(x, residual)
        normed, residual = self._post_norm.add(self._attention(normed, backend, context), residual)
        return self._feed_forward(normed), residual


class Decoder:
    """Token embeddings in, hidden states and logits out."""

    def __init__(self, loader: LayerLoader, config: ModelConfig, backend: AttentionBackend) -> None:
        self._backend = backend
        self._kernels = loader.kernels
        shape = (config.vocab_size, config.hidden_size)
        self._embedding = loader.embedding("model.embed_tokens", shape)
        self._layers = [DecoderLayer(loader, f"model.layers.{i}", config, i) for i in range(config.num_layers)]
        self._norm = loader.norm("model.norm", config.hidden_size, config.rms_norm_eps)
        self._head = (
            Linear(self._embedding.as_head())
            if config.tie_word_embeddings
            else loader.linear(["lm_head"], config.hidden_size, (config.vocab_size,), bias=False)
        )

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids `[T]` -> `[T, hidden]`."""
        return self._embedding(token_ids)

    def forward(self, x: torch.Tensor, context: ForwardContext, deepstack: Sequence[torch.Tensor] = ()) -> torch.Tensor:
        """Embeddings `[T, hidden]` -> hidden states `[T, hidden]`, before the last norm.

        The i-th of `deepstack`, `[T, hidden]`, is added after layer i (Meng et al. 2024).
        """
        residual = None
        for i, layer in enumerate(self._layers):
            x, residual = layer(x, residual, self._backend, context)
            if i < len(deepstack):
                x = x + deepstack[i]
        return x if residual is None else self._kernels.add(x, residual)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states `[N, hidden]` -> `[N, vocab]`."""
        return self._head(self._norm(hidden))
