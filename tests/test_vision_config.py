"""Configurations of vision-language checkpoints, nested and flat."""

from typing import Any

import pytest

from mmserve.config import ModelConfig, has_tied_embeddings

_SIZES = {
    "vocab_size": 10,
    "hidden_size": 64,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}
_VISION = {"depth": 1}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, False),
        ({"tie_word_embeddings": True}, True),
        ({"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}, True),
        ({"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": False}}, True),
        ({"text_config": {}}, False),
        ({"text_config": None, "tie_word_embeddings": True}, True),
    ],
)
def test_embeddings_are_tied_where_any_part_says_so(config: dict[str, Any], expected: bool) -> None:
    assert has_tied_embeddings(config) is expected
    text = {**_SIZES, **(config.get("text_config") or {})}
    assert (
        ModelConfig.from_hf({**config, "vision_config": _VISION, "text_config": text}).tie_word_embeddings is expected
    )


@pytest.mark.parametrize(
    ("family", "qkv_bias", "qk_norm"),
    [
        ("qwen2_vl", True, False),
        ("qwen2_5_vl", True, False),
        ("qwen3_vl", False, True),
    ],
)
def test_flat_and_nested_say_the_same(family: str, qkv_bias: bool, qk_norm: bool) -> None:
    """Qwen2-VL was published flat; transformers saves it nested."""
    flat = {**_SIZES, "model_type": family, "architectures": ["X"], "vision_config": _VISION, "eos_token_id": 7}
    nested = {"model_type": family, "architectures": ["X"], "vision_config": _VISION, "eos_token_id": 7}
    nested["text_config"] = {**_SIZES, "model_type": f"{family}_text"}
    one, other = ModelConfig.from_hf(flat), ModelConfig.from_hf(nested)
    assert (one.multimodal, other.multimodal) == (flat, nested)
    for config in (one, other):
        assert config.qkv_bias is qkv_bias
        assert config.qk_norm is qk_norm
        assert not config.o_bias
        assert config.eos_token_ids == (7,)
    assert one.rope == other.rope


@pytest.mark.parametrize(
    ("outer", "text", "dtype"),
    [
        ({"torch_dtype": "float16"}, {"torch_dtype": "bfloat16"}, "float16"),
        ({"dtype": "bfloat16"}, {}, "bfloat16"),
        ({}, {"torch_dtype": "bfloat16"}, "bfloat16"),
        ({}, {}, "float32"),
    ],
)
def test_the_whole_file_decides_the_precision(outer: dict[str, Any], text: dict[str, Any], dtype: str) -> None:
    config = {**outer, "vision_config": _VISION, "text_config": {**_SIZES, **text}}
    assert ModelConfig.from_hf(config).dtype == dtype


@pytest.mark.parametrize(
    ("family", "text", "expected"),
    [
        # lmsys/vicuna-7b-v1.5 in LLaVA-1.5.
        ("llava", {"max_position_embeddings": 4096, "model_type": "llama", "vocab_size": 32064}, (11008, 32, 4096)),
        # mistralai/Mistral-7B-Instruct-v0.2 in LLaVA-NeXT.
        (
            "llava_next",
            {"intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral"}
            | {"num_key_value_heads": 8, "sliding_window": None},
            (14336, 8, 32768),
        ),
        # Qwen/Qwen2-7B-Instruct in LLaVA-OneVision.
        (
            "llava_onevision",
            {"hidden_size": 3584, "intermediate_size": 18944, "model_type": "qwen2", "num_attention_heads": 28}
            | {"num_hidden_layers": 28, "num_key_value_heads": 4, "vocab_size": 152000},
            (18944, 4, 32768),
        ),
    ],
)
def test_published_text_parts_leave_out_what_is_usual(
    family: str, text: dict[str, Any], expected: tuple[int, int, int]
) -> None:
    config = ModelConfig.from_hf({"model_type": family, "vision_config": _VISION, "text_config": text})
    assert (config.intermediate_size, config.num_kv_heads, config.max_context) == expected
    assert config.qkv_bias is (family == "llava_onevision")
