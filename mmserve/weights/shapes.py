"""Published shapes of models, which `--model shape:NAME --load-format dummy` runs with random weights and no file.

The facts are those of each model's config.json and preprocessor_config.json; the tokenizer is a stand-in with the
published ids of the special tokens and a token a byte.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from mmserve.errors import SetupError

PREFIX = "shape:"
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)

# From <|endoftext|> on, in the order of their ids; the last two stand where each picture and film goes.
_QWEN_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
_PARTS = (
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
)
_QWEN_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    + _PARTS.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
    + "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_LLAVA_TEMPLATE = (
    "{% for message in messages %}{{ message.role | upper + ': ' }}"
    + _PARTS.replace("IMAGE", "{{ '<image>\n' }}")
    + "{{ ' ' }}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """`config` and `processor_config` are config.json and preprocessor_config.json.

    Tokens from `first_special_id` on are `special_tokens`; `named_tokens` are those that have a role (`eos_token`).
    """

    config: Mapping[str, Any]
    processor_config: Mapping[str, Any] = field(default_factory=dict)
    first_special_id: int
    special_tokens: tuple[str, ...] = ()
    named_tokens: Mapping[str, str] = field(default_factory=dict)
    chat_template: str = PLAIN_TEMPLATE


def is_shape(model: str) -> bool:
    """Whether `model` names a published shape instead of files."""
    return model.startswith(PREFIX)


def find_shape(model: str) -> Shape:
    """Raises `SetupError` (`model_unavailable`) that names the shapes there are."""
    shape = SHAPES.get(model.removeprefix(PREFIX))
    if shape is None:
        known = ", ".join(PREFIX + name for name in SHAPES)
        raise SetupError("model_unavailable", f"there is no {model!r}: the shapes are {known}")
    return shape


def _llama(**own: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "max_position_embeddings": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 32000,
        **own,
    }


_LLAMA_2_7B = Shape(config=_llama(), first_special_id=32000)
_LLAMA_2_13B = Shape(
    config=_llama(
        hidden_size=5120,
        intermediate_size=13824,
        num_attention_heads=40,
        num_hidden_layers=40,
        num_key_value_heads=40,
    ),
    first_special_id=32000,
)
_LLAMA_3_1_8B = Shape(
    config=_llama(
        bos_token_id=128000,
        eos_token_id=[128001, 128008, 128009],
        intermediate_size=14336,
        max_position_embeddings=131072,
        num_key_value_heads=8,
        rope_scaling={
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        rope_theta=500000.0,
        vocab_size=128256,
    ),
    first_special_id=128256,
)


def _qwen(config: Mapping[str, Any], processor_config: Mapping[str, Any] = MappingProxyType({})) -> Shape:
    return Shape(
        config=config,
        processor_config=processor_config,
        first_special_id=151643,
        special_tokens=_QWEN_TOKENS,
        named_tokens={"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        chat_template=_QWEN_TEMPLATE,
    )


_QWEN2_5_DECODER: Mapping[str, Any] = MappingProxyType(
    {
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "hidden_act": "silu",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "max_window_layers": 28,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 152064,
    }
)
_QWEN2_5_7B = _qwen(
    {
        **_QWEN2_5_DECODER,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "max_position_embeddings": 32768,
        "sliding_window": 131072,
    }
)
_QWEN2_5_VL_7B = _qwen(
    {
        **_QWEN2_5_DECODER,
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "image_token_id": 151655,
        "video_token_id": 151656,
        "max_position_embeddings": 128000,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "sliding_window": 32768,
        "vision_config": {
            "depth": 32,
            "hidden_act": "silu",
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "in_chans": 3,
            "out_hidden_size": 3584,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "tokens_per_second": 2,
            "temporal_patch_size": 2,
        },
    },
    {
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": 3136,
        "max_pixels": 12845056,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": _CLIP_MEAN,
        "image_std": _CLIP_STD,
    },
)
_QWEN3_VL_8B = _qwen(
    {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "image_token_id": 151655,
        "video_token_id": 151656,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "text_config": {
            "model_type": "qwen3_vl_text",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 151643,
            "eos_token_id": 151645,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "max_position_embeddings": 262144,
            "num_attention_heads": 32,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
            "rope_theta": 5000000,
            "vocab_size": 151936,
        },
        "vision_config": {
            "model_type": "qwen3_vl",
            "deepstack_visual_indexes": [8, 16, 24],
            "depth": 27,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 1152,
            "in_channels": 3,
            "intermediate_size": 4304,
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "out_hidden_size": 4096,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    },
    {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": {"longest_edge": 16777216, "shortest_edge": 65536},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": (0.5, 0.5, 0.5),
        "image_std": (0.5, 0.5, 0.5),
    },
)
_LLAVA_1_5_7B = Shape(
    config={
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": 32000,
        "image_seq_length": 576,
        "pad_token_id": 32001,
        "projector_hidden_act": "gelu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "text_config": {
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "max_position_embeddings": 4096,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-05,
            "rope_theta": 10000.0,
            "vocab_size": 32064,
        },
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 1024,
            "image_size": 336,
            "intermediate_size": 4096,
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "patch_size": 14,
            "projection_dim": 768,
            "vocab_size": 32000,
        },
    },
    processor_config={
        "image_processor_type": "CLIPImageProcessor",
        "crop_size": {"height": 336, "width": 336},
        "size": {"shortest_edge": 336},
        "do_center_crop": True,
        "do_resize": True,
        "resample": 3,
        "image_mean": _CLIP_MEAN,
        "image_std": _CLIP_STD,
    },
    first_special_id=32000,
    special_tokens=("<image>", "<pad>"),
    named_tokens={"pad_token": "<pad>"},
    chat_template=_LLAVA_TEMPLATE,
)

SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        "llama-2-7b": _LLAMA_2_7B,
        "llama-2-13b": _LLAMA_2_13B,
        "llama-3.1-8b": _LLAMA_3_1_8B,
        "qwen2.5-7b": _QWEN2_5_7B,
        "qwen2.5-vl-7b": _QWEN2_5_VL_7B,
        "qwen3-vl-8b": _QWEN3_VL_8B,
        "llava-1.5-7b": _LLAVA_1_5_7B,
    }
)
