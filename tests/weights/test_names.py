import pytest

from mmserve.weights.names import from_gguf, to_canonical, to_causal_lm


@pytest.mark.parametrize(
    ("gguf_name", "name"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output.weight", "lm_head.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.12.attn_q.bias", "model.layers.12.self_attn.q_proj.bias"),
        ("blk.0.attn_k_norm.weight", "model.layers.0.self_attn.k_norm.weight"),
        ("blk.7.ffn_norm.weight", "model.layers.7.post_attention_layernorm.weight"),
        ("blk.7.ffn_gate_exps.weight", "blk.7.ffn_gate_exps.weight"),
        ("rope_freqs.weight", "rope_freqs.weight"),
    ],
)
def test_gguf_names_become_hugging_face_names(gguf_name: str, name: str) -> None:
    assert from_gguf(gguf_name) == name


def test_only_bare_decoders_get_a_prefix() -> None:
    bare = ["embed_tokens.weight", "norm.weight", "lm_head.weight"]
    assert list(to_causal_lm(bare)) == ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    assert to_causal_lm(["model.norm.weight"]) == {"model.norm.weight": "model.norm.weight"}


@pytest.mark.parametrize(
    ("model_type", "stored", "name"),
    [
        ("qwen2_vl", "visual.blocks.3.attn.qkv.weight", "vision.blocks.3.attn.qkv.weight"),
        ("qwen2_vl", "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("qwen2_vl", "lm_head.weight", "lm_head.weight"),
        ("qwen2_5_vl", "model.visual.merger.ln_q.weight", "vision.merger.ln_q.weight"),
        ("qwen2_5_vl", "model.language_model.norm.weight", "model.norm.weight"),
        ("qwen3_vl", "model.visual.pos_embed.weight", "vision.pos_embed.weight"),
        ("qwen3_vl", "model.language_model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("llava", "language_model.model.layers.3.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"),
        ("llava", "language_model.lm_head.weight", "lm_head.weight"),
        ("llava", "lm_head.weight", "lm_head.weight"),
        ("llava", "vision_tower.vision_model.pre_layrnorm.bias", "vision.pre_layrnorm.bias"),
        ("llava", "vision_tower.pre_layrnorm.bias", "vision.pre_layrnorm.bias"),
        ("llava", "multi_modal_projector.linear_1.bias", "projector.linear_1.bias"),
        ("llava_next", "image_newline", "projector.image_newline"),
        ("llava_next", "model.image_newline", "projector.image_newline"),
        ("llava_next", "model.language_model.norm.weight", "model.norm.weight"),
        ("llava_onevision", "model.vision_tower.vision_model.head.probe", "vision.head.probe"),
        ("llava_onevision", "model.multi_modal_projector.linear_2.weight", "projector.linear_2.weight"),
        ("idefics3", "model.vision_model.post_layernorm.bias", "vision.post_layernorm.bias"),
        ("idefics3", "model.connector.modality_projection.proj.weight", "projector.modality_projection.proj.weight"),
        ("smolvlm", "model.text_model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("smolvlm", "lm_head.weight", "lm_head.weight"),
        ("llama", "model.norm.weight", "model.norm.weight"),
    ],
)
def test_vision_language_names_become_canonical(model_type: str, stored: str, name: str) -> None:
    assert to_canonical([stored], model_type) == {name: stored}
