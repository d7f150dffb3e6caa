"""The published configurations of three vision-language models, in full, and small ones of the same structure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from random_weights import Gains

from mmserve.vision.image_plan import ImageProcessor
from mmserve.vision.processors.llava import LlavaProcessor
from mmserve.vision.processors.qwen import QwenProcessor

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, kw_only=True)
class Published:
    """`config` and `settings` are config.json and preprocessor_config.json, `page` the width and height of a picture.

    In the prompt a page has a budget of `prompt_pixels` (0: none); `num_words` token ids are those of plain text;
    `before` and `after` stand around a picture; `chunk` is the number of prompt tokens a step. With `gains`, faults
    show in the logits and rounding does not.
    """

    title: str
    config: Mapping[str, Any]
    settings: Mapping[str, Any]
    page: tuple[int, int] = (1240, 1754)
    prompt_pixels: int = 0
    num_words: int
    image_token_id: int
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    chunk: int = 512
    gains: Gains

    @property
    def family(self) -> str:
        return str(self.config["model_type"])

    def processor(self) -> ImageProcessor:
        reader = LlavaProcessor if self.family == "llava" else QwenProcessor
        return reader.from_settings(dict(self.settings), dict(self.config))


_QWEN2_5_VL_7B = Published(
    title="Qwen2.5-VL-7B",
    gains=Gains(scores=2.0, vision_scores=0.5),
    num_words=151643,
    image_token_id=151655,
    before=(151652,),
    after=(151653,),
    prompt_pixels=1000 * 28 * 28,
    config={
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "image_token_id": 151655,
        "video_token_id": 151656,
        "hidden_act": "silu",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "max_position_embeddings": 128000,
        "max_window_layers": 28,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "sliding_window": 32768,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "vocab_size": 152064,
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
    settings={
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": 3136,
        "max_pixels": 12845056,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
    },
)

_QWEN3_VL_8B = Published(
    title="Qwen3-VL-8B",
    gains=Gains(scores=3.0, vision_scores=3.0),
    num_words=151643,
    image_token_id=151655,
    before=(151652,),
    after=(151653,),
    prompt_pixels=1000 * 32 * 32,
    config={
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "image_token_id": 151655,
        "video_token_id": 151656,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "tie_word_embeddings": False,
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
    settings={
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": {"longest_edge": 16777216, "shortest_edge": 65536},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": (0.5, 0.5, 0.5),
        "image_std": (0.5, 0.5, 0.5),
    },
)

_LLAVA_1_5_7B = Published(
    title="LLaVA-1.5-7B",
    gains=Gains(scores=2.5, vision_scores=2.5),
    num_words=32000,
    image_token_id=32000,
    page=(336, 336),
    config={
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": 32000,
        "image_seq_length": 576,
        "pad_token_id": 32001,
        "projector_hidden_act": "gelu",
        "tie_word_embeddings": False,
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
    settings={
        "image_processor_type": "CLIPImageProcessor",
        "crop_size": {"height": 336, "width": 336},
        "size": {"shortest_edge": 336},
        "do_center_crop": True,
        "do_resize": True,
        "resample": 3,
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
    },
)

PUBLISHED: Mapping[str, Published] = MappingProxyType(
    {shape.family: shape for shape in (_QWEN2_5_VL_7B, _QWEN3_VL_8B, _LLAVA_1_5_7B)}
)

# What is smaller in the small ones: of the decoder, of the encoder.
_TINY: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = MappingProxyType(
    {
        "qwen2_5_vl": (
            {"num_attention_heads": 4, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
            {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "fullatt_block_indexes": [1]},
        ),
        "qwen3_vl": (
            {"rope_scaling": {"mrope_interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"}},
            {
                "depth": 3,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_heads": 2,
                "num_position_embeddings": 36,
                "deepstack_visual_indexes": [0, 1],
            },
        ),
        "llava": (
            {"num_key_value_heads": 4},
            {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 3,
                "num_attention_heads": 2,
                "image_size": 56,
            },
        ),
    }
)
# Few layers in float32 bear more.
_TINY_GAINS = Gains(scores=3.0, vision_scores=3.0)
_TINY_DECODER: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
    }
)


def tiny(shape: Published) -> Published:
    """The same structure with few, narrow layers; the vocabulary stays, for the sake of the special tokens."""
    decoder, encoder = ({**common, **own} for common, own in zip((_TINY_DECODER, {}), _TINY[shape.family], strict=True))
    shape = replace(shape, gains=_TINY_GAINS)
    if shape.family == "llava":
        settings = {**shape.settings, "size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
        return replace(shape, config=resized(shape.config, decoder, encoder), settings=settings, page=(56, 56), chunk=9)
    encoder["out_hidden_size"] = decoder["hidden_size"]
    pixels = shape.prompt_pixels // 1000 * 60
    settings = {**shape.settings, "size": {"shortest_edge": 3136, "longest_edge": 4 * pixels}, "max_pixels": 4 * pixels}
    config = resized(shape.config, decoder, encoder)
    return replace(shape, config=config, settings=settings, prompt_pixels=pixels, chunk=16)


def resized(config: Mapping[str, Any], decoder: Mapping[str, Any], encoder: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with some fields of its decoder (nested or not) and of its encoder replaced."""
    changed = {**config, "vision_config": {**config["vision_config"], **encoder}}
    if "text_config" not in config:
        return {**changed, **decoder}
    return {**changed, "text_config": {**config["text_config"], **decoder}}
