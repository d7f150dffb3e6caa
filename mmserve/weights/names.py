"""Names of weights, brought to one form whatever the file calls them.

Decoders have the names of Hugging Face's causal language models; in vision-language checkpoints the vision tower stands
under `vision.`, and what lies between it and the decoder under `projector.`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

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


# By `model_type`: pattern at the start of a name, and what stands there instead. The first that matches counts.
_VISION_LANGUAGE: Mapping[str, Sequence[tuple[str, str]]] = {
    **dict.fromkeys(
        ("llava", "llava_next", "llava_onevision"),
        (
            (r"(model\.)?vision_tower\.(vision_model\.)?", "vision."),
            (r"(model\.)?multi_modal_projector\.", "projector."),
            (r"(model\.)?image_newline", "projector.image_newline"),
            (r"language_model\.model\.|model\.language_model\.", "model."),
            (r"language_model\.lm_head\.", "lm_head."),
        ),
    ),
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"),
        ((r"(model\.)?visual\.", "vision."), (r"model\.language_model\.", "model.")),
    ),
    **dict.fromkeys(
        ("idefics3", "smolvlm"),
        (
            (r"(model\.)?vision_model\.", "vision."),
            (r"(model\.)?connector\.", "projector."),
            (r"(model\.)?text_model\.", "model."),
        ),
    ),
}


def to_canonical(names: Iterable[str], model_type: str = "") -> dict[str, str]:
    """Canonical name -> name in the file, by the rules of `config.json`'s `model_type`."""
    if rules := _VISION_LANGUAGE.get(model_type):
        return {_renamed(name, rules): name for name in names}
    return to_causal_lm(names)


def _renamed(name: str, rules: Sequence[tuple[str, str]]) -> str:
    for pattern, replacement in rules:
        if match := re.match(pattern, name):
            return match.expand(replacement) + name[match.end() :]
    return name


def to_causal_lm(names: Iterable[str]) -> dict[str, str]:
    """Causal-LM name -> name in the file. Checkpoints of the bare decoder lack the prefix `model.`."""
    names = list(names)
    prefix = "model." if "embed_tokens.weight" in names else ""
    return {name if name.startswith("lm_head.") else prefix + name: name for name in names}
