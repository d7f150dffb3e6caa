"""Writes a tiny checkpoint of `reference_models` as a GGUF file, the way that llama.cpp's converter would."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter, quants
from gguf.constants import GGMLQuantizationType, TokenType
from safetensors.numpy import load_file

_NAMES = {
    "model.embed_tokens.": "token_embd.",
    "model.norm.": "output_norm.",
    "lm_head.": "output.",
    "model.layers.": "blk.",
    ".input_layernorm.": ".attn_norm.",
    ".post_attention_layernorm.": ".ffn_norm.",
    ".self_attn.q_proj.": ".attn_q.",
    ".self_attn.k_proj.": ".attn_k.",
    ".self_attn.v_proj.": ".attn_v.",
    ".self_attn.o_proj.": ".attn_output.",
    ".self_attn.q_norm.": ".attn_q_norm.",
    ".self_attn.k_norm.": ".attn_k_norm.",
    ".mlp.gate_proj.": ".ffn_gate.",
    ".mlp.up_proj.": ".ffn_up.",
    ".mlp.down_proj.": ".ffn_down.",
}


def save_reference_gguf(
    folder: Path,
    path: Path,
    *,
    type_name: str = "F32",
    pre_tokenizer: str = "gpt-2",
    metadata: Mapping[str, Any] | None = None,
    quantize: Callable[[np.ndarray, GGMLQuantizationType], np.ndarray] = quants.quantize,
) -> Path:
    """The checkpoint in `folder` as `path`, matrices in `type_name`; `metadata` comes on top of the converter's."""
    config = json.loads((folder / "config.json").read_text())
    architecture = "llama" if config["model_type"] == "mistral" else config["model_type"]
    writer = GGUFWriter(str(path), architecture)
    _write_shape(writer, config)
    _write_tokenizer(writer, folder, pre_tokenizer)
    for key, value in (metadata or {}).items():
        _write_value(writer, key, value)
    for name, values in _tensors(folder, config, architecture):
        kind = GGMLQuantizationType[type_name if values.ndim > 1 else "F32"]
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def interleave_rotary_halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """The order that GGUF's llama architecture has rows of q and k in: the halves of each head take turns."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def _tensors(folder: Path, config: Mapping[str, Any], architecture: str) -> Iterator[tuple[str, np.ndarray]]:
    for file in sorted(folder.glob("*.safetensors")):
        for name, values in load_file(file).items():
            if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
                heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
                values = interleave_rotary_halves(values, heads)
            yield _gguf_name(name), values
    rope = config.get("rope_parameters", {})
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", _llama3_factors(rope, config)


def _gguf_name(name: str) -> str:
    for ours, theirs in _NAMES.items():
        name = name.replace(ours, theirs)
    return name


def _llama3_factors(rope: Mapping[str, Any], config: Mapping[str, Any]) -> np.ndarray:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    original = rope["original_max_position_embeddings"]
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (i / head_dim)
        if wavelength < original / rope["high_freq_factor"]:
            factors.append(1.0)
        elif wavelength > original / rope["low_freq_factor"]:
            factors.append(rope["factor"])
        else:
            span = rope["high_freq_factor"] - rope["low_freq_factor"]
            smooth = (original / wavelength - rope["low_freq_factor"]) / span
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, dtype=np.float32)


def _write_shape(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])


def _write_tokenizer(writer: GGUFWriter, folder: Path, pre_tokenizer: str) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    special = {token["id"] for token in tokenizer["added_tokens"]}
    tokens: Sequence[str] = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(list(tokens))
    writer.add_token_types([TokenType.CONTROL if i in special else TokenType.NORMAL for i in range(len(tokens))])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_chat_template((folder / "chat_template.jinja").read_text())


def _write_value(writer: GGUFWriter, key: str, value: Any) -> None:
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    adders.get(type(value), writer.add_array)(key, value)
