"""Names of weights: GGUF's and headless checkpoints' brought to those of Hugging Face causal language models."""

import re
from collections.abc import Iterable

_GGUF_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_GGUF_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def from_gguf(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; a name it does not know stays as it is."""
    if block := _GGUF_BLOCK_NAME.fullmatch(name):
        layer, part, kind = block.groups()
        return f"model.layers.{layer}.{_GGUF_BLOCK[part]}.{kind}" if part in _GGUF_BLOCK else name
    stem, _, kind = name.rpartition(".")
    return f"{_GGUF_TOP[stem]}.{kind}" if stem in _GGUF_TOP else name


def to_causal_lm(names: Iterable[str]) -> dict[str, str]:
    """Causal-LM name -> name in the file. Checkpoints of the bare decoder lack the prefix `model.`."""
    names = list(names)
    prefix = "model." if "embed_tokens.weight" in names else ""
    return {name if name.startswith("lm_head.") else prefix + name: name for name in names}
