"""GGUF metadata -> what a Hugging Face `config.json` would hold, for the architectures llama, qwen2 and qwen3.

Keys are those of the GGUF specification and of llama.cpp's converter.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

from mmserve.errors import SetupError

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_YARN_KEYS = {
    "rope.scaling.attn_factor": "attention_factor",
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
# Names that llama.cpp, too, takes as ends of a turn whatever the metadata says.
_END_OF_TURN = frozenset({"<|im_end|>", "<|eot_id|>", "<|endoftext|>"})


def to_hf_config(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], rope_factors: torch.Tensor | None
) -> dict[str, Any]:
    """From `shapes` of tensors by GGUF name, and `rope_freqs.weight` if any. `SetupError` for what is not supported."""
    architecture = metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise SetupError("model_unavailable", f"GGUF architecture {architecture!r} is not supported, only {known}")
    try:
        return _convert(_Keys(metadata, architecture), shapes, rope_factors)
    except KeyError as error:
        raise SetupError("model_unavailable", f"the GGUF file lacks {error.args[0]!r}: fetch it again") from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise SetupError(
            "model_unavailable", f"the GGUF file's metadata is damaged ({error}): fetch it again"
        ) from None


class _Keys:
    """Metadata under an architecture's prefix."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self.metadata = metadata
        self.architecture = architecture

    def __getitem__(self, key: str) -> Any:
        return self.metadata[f"{self.architecture}.{key}"]

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}", default)


def _convert(keys: _Keys, shapes: Mapping[str, tuple[int, ...]], rope_factors: torch.Tensor | None) -> dict[str, Any]:
    _refuse_unsupported(keys)
    num_heads = keys["attention.head_count"]
    head_dim = keys.get("attention.key_length") or keys["embedding_length"] // num_heads
    if keys.get("rope.dimension_count", head_dim) != head_dim:
        raise SetupError("model_unavailable", "this GGUF rotates only a part of each head, which is not supported")
    window = keys.get("attention.sliding_window")
    return {
        "architectures": [_ARCHITECTURES[keys.architecture]],
        "model_type": keys.architecture,
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": keys["embedding_length"],
        "intermediate_size": keys["feed_forward_length"],
        "num_hidden_layers": keys["block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": keys["attention.layer_norm_rms_epsilon"],
        "max_position_embeddings": keys["context_length"],
        "rope_theta": keys.get("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(keys, head_dim, rope_factors),
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": keys.architecture == "llama" and "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in shapes,
        "sliding_window": window,
        "use_sliding_window": bool(window),
        "hidden_act": "silu",
        "bos_token_id": keys.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_token_ids(keys.metadata),
    }


def end_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Tokens that end an answer: end of sequence, end of turn, end of message."""
    named = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    spelled = [i for i, token in enumerate(metadata.get("tokenizer.ggml.tokens", ())) if token in _END_OF_TURN]
    return list(dict.fromkeys([*(token_id for token_id in named if token_id is not None), *spelled]))


def _refuse_unsupported(keys: _Keys) -> None:
    if keys.get("expert_count"):
        raise SetupError(
            "model_unavailable", "this GGUF is a mixture of experts, which is not supported: take a dense model"
        )
    if keys.metadata.get("split.count", 1) > 1:
        raise SetupError(
            "model_unavailable", "this GGUF is one part of several: merge them with `llama-gguf-split --merge` first"
        )
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        if isinstance(keys.get(key), list):
            raise SetupError("model_unavailable", f"this GGUF has a {key} per layer, which is not supported")


def _rope_scaling(keys: _Keys, head_dim: int, rope_factors: torch.Tensor | None) -> dict[str, Any] | None:
    if rope_factors is not None:
        return _llama3_scaling(keys.get("rope.freq_base", 10000.0), head_dim, rope_factors)
    kind = keys.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise SetupError("model_unavailable", f"rope scaling {kind!r} of this GGUF is not supported")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": keys["rope.scaling.factor"]}
    if kind == "yarn":
        original = keys.get("rope.scaling.original_context_length")
        scaling |= {} if original is None else {"original_max_position_embeddings": original}
        scaling |= {name: keys.get(key) for key, name in _YARN_KEYS.items() if keys.get(key) is not None}
    return scaling


def _llama3_scaling(theta: float, head_dim: int, factors: torch.Tensor) -> dict[str, Any]:
    """The parameters behind Llama 3's per-frequency factors: GGUF stores the factors but not what they came from."""
    wanted = factors.double()
    for original in (2**power for power in range(4, 21)):
        scaling = {
            "rope_type": "llama3",
            "factor": float(wanted.max()),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": original,
        }
        if torch.allclose(_llama3_factors(theta, head_dim, scaling), wanted, rtol=1e-4):
            return scaling
    raise SetupError("model_unavailable", "the rope_freqs of this GGUF are not Llama 3's, which is not supported")


def _llama3_factors(theta: float, head_dim: int, scaling: Mapping[str, Any]) -> torch.Tensor:
    """What each rotary frequency is divided by [head_dim / 2] (Llama 3.1's reference code)."""
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    turns = scaling["original_max_position_embeddings"] / (2 * math.pi * theta**exponents)
    smooth = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    factors: torch.Tensor = 1.0 / ((1.0 - smooth) / factor + smooth)
    return factors
