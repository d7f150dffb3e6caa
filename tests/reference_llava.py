"""Tiny random checkpoints of the LLaVA models, their pictures, and transformers' answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from vision_driver import Item, Picture
from vision_reference import TEXT_CONFIG, VisionReference, save_random_model

from mmserve.vision.image_source import PixelLimits

VOCAB_SIZE = 410
IMAGE_TOKEN = 404
TILE = 56
PATCHES_A_SIDE = TILE // 14
# Scaled down from the 1.5 times as many rows and columns that the largest grid has.
MAX_TILES = 4
_TEXT: Mapping[str, Any] = MappingProxyType({"vocab_size": VOCAB_SIZE, "rope_theta": 10000.0, **TEXT_CONFIG})
_LLAMA3_ROPE: Mapping[str, Any] = MappingProxyType(
    {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
)
_TOWER: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": TILE,
        "patch_size": 14,
    }
)
_CLIP: Mapping[str, Any] = MappingProxyType({"model_type": "clip_vision_model", **_TOWER})
_SIGLIP: Mapping[str, Any] = MappingProxyType({"model_type": "siglip_vision_model", "vision_use_head": False, **_TOWER})
_NEXT_GRIDS = [[TILE, 2 * TILE], [2 * TILE, TILE], [2 * TILE, 2 * TILE], [3 * TILE, TILE], [TILE, 3 * TILE]]
_ONEVISION_GRIDS = [[rows * TILE, columns * TILE] for rows in range(1, 4) for columns in range(1, 4)]


@dataclass(frozen=True)
class Family:
    """`prefix` of transformers' classes, and of `image_processor`; text and vision configuration, and the rest."""

    prefix: str
    image_processor: str
    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    more: Mapping[str, Any] = field(default_factory=dict)


_NEXT_MORE: Mapping[str, Any] = MappingProxyType({"image_grid_pinpoints": _NEXT_GRIDS})
_ONEVISION_MORE: Mapping[str, Any] = MappingProxyType(
    {"image_grid_pinpoints": _ONEVISION_GRIDS, "vision_aspect_ratio": f"anyres_max_{MAX_TILES}"}
)
# The three families, and what else their checkpoints come with.
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llava": Family("Llava", "CLIP", {"model_type": "llama", **_TEXT}, _CLIP),
        "llava_next": Family("LlavaNext", "LlavaNext", {"model_type": "mistral", **_TEXT}, _CLIP, _NEXT_MORE),
        "llava_onevision": Family(
            "LlavaOnevision", "LlavaOnevision", {"model_type": "qwen2", **_TEXT}, _SIGLIP, _ONEVISION_MORE
        ),
    }
)
VARIANTS: Mapping[str, Family] = MappingProxyType(
    {
        "llava with two layers, all tokens": Family(
            "Llava",
            "CLIP",
            {"model_type": "llama", **_TEXT},
            _CLIP,
            {"vision_feature_layer": [-1, 1], "vision_feature_select_strategy": "full"},
        ),
        "llava with SigLIP": Family(
            "Llava",
            "Siglip",
            {"model_type": "llama", **_TEXT},
            {**_SIGLIP, "vision_use_head": True},
            {"vision_feature_select_strategy": "full", "projector_hidden_act": "gelu_pytorch_tanh"},
        ),
        "llava_next with Vicuna": Family(
            "LlavaNext", "LlavaNext", {"model_type": "llama", **_TEXT, "num_key_value_heads": 4}, _CLIP, _NEXT_MORE
        ),
        "llava_next with Llama 3": Family(
            "LlavaNext",
            "LlavaNext",
            {"model_type": "llama", **_TEXT, "rope_parameters": dict(_LLAMA3_ROPE)},
            _CLIP,
            {**_NEXT_MORE, "multimodal_projector_bias": False},
        ),
        "llava_onevision tied": Family(
            "LlavaOnevision",
            "LlavaOnevision",
            {"model_type": "qwen2", **_TEXT, "tie_word_embeddings": True},
            _SIGLIP,
            _ONEVISION_MORE,
        ),
    }
)


def save_llava(family: Family, folder: Path, *, seed: int = 0, max_shard_size: str = "5GB") -> Path:
    """A random checkpoint with processor settings and tokenizer, as transformers saves it."""
    config = {
        "text_config": dict(family.text),
        "vision_config": dict(family.vision),
        "image_token_index": IMAGE_TOKEN,
        **family.more,
    }
    save_random_model(family.prefix, config, folder, seed, max_shard_size)
    _image_processor(family).save_pretrained(str(folder))
    return folder


def _image_processor(family: Family) -> Any:
    import transformers

    settings: dict[str, Any] = {"size": {"height": TILE, "width": TILE}}
    if family.image_processor in ("CLIP", "LlavaNext"):
        settings = {"size": {"shortest_edge": TILE}, "crop_size": {"height": TILE, "width": TILE}}
    if grids := family.more.get("image_grid_pinpoints"):
        settings["image_grid_pinpoints"] = grids
    return getattr(transformers, f"{family.image_processor}ImageProcessorPil")(**settings)


@dataclass
class Reference(VisionReference):
    family: Family
    folder: Path

    @property
    def class_prefix(self) -> str:
        return self.family.prefix

    def picture(self, image: torch.Tensor) -> Picture:
        plan = self.processor.plan(image.shape[1], image.shape[0], PixelLimits())
        [patches] = self.processor.process(image, plan)
        return Picture(self.processor.placeholder_ids(plan), (Item(patches, plan.num_tokens),))

    def vision_arguments(self, pieces: Sequence[Sequence[int] | Picture]) -> dict[str, torch.Tensor]:
        patches = [piece.items[0].patches for piece in pieces if isinstance(piece, Picture)]
        if not patches:
            return {}
        vision = {"pixel_values": torch.cat([image.pixels for image in patches])}
        if patches[0].layout:
            vision["image_sizes"] = torch.tensor([image.layout for image in patches])
        return vision

    @torch.inference_mode()
    def features(self, pictures: Sequence[Picture]) -> list[torch.Tensor]:
        """What the placeholders of each picture are replaced by, `[num_tokens, hidden]`."""
        return list(self.model.model.get_image_features(**self.vision_arguments(pictures)).pooler_output)
