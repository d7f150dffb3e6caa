"""Three vision-language models at their published shapes, and small ones of the same structure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from random_weights import Gains

from mmserve.vision.image_plan import ImageProcessor
from mmserve.vision.processors.llava import LlavaProcessor
from mmserve.vision.processors.qwen import QwenProcessor
from mmserve.weights.shapes import SHAPES


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
    config=SHAPES["qwen2.5-vl-7b"].config,
    settings=SHAPES["qwen2.5-vl-7b"].processor_config,
)

_QWEN3_VL_8B = Published(
    title="Qwen3-VL-8B",
    gains=Gains(scores=3.0, vision_scores=3.0),
    num_words=151643,
    image_token_id=151655,
    before=(151652,),
    after=(151653,),
    prompt_pixels=1000 * 32 * 32,
    config=SHAPES["qwen3-vl-8b"].config,
    settings=SHAPES["qwen3-vl-8b"].processor_config,
)

_LLAVA_1_5_7B = Published(
    title="LLaVA-1.5-7B",
    gains=Gains(scores=2.5, vision_scores=2.5),
    num_words=32000,
    image_token_id=32000,
    page=(336, 336),
    config=SHAPES["llava-1.5-7b"].config,
    settings=SHAPES["llava-1.5-7b"].processor_config,
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
