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
