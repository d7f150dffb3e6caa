"""Tiny random checkpoints of the Qwen-VL models, their pictures, and transformers' answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from vision_driver import Item, Picture
from vision_reference import TEXT_CONFIG, VisionReference, prompt_ids, save_random_model

from mmserve.vision.patches import PixelPatches

VOCAB_SIZE = 410
VISION_START, VISION_END, IMAGE_TOKEN, VIDEO_TOKEN = 402, 403, 404, 405
MERGE = 2
# A page of 1240 x 1754 then takes about 50 tokens.
MAX_PIXELS = 40_000
_TEXT: Mapping[str, Any] = MappingProxyType({"vocab_size": VOCAB_SIZE, **TEXT_CONFIG})
_VISION: Mapping[str, Any] = MappingProxyType({"depth": 3, "num_heads": 2, "spatial_merge_size": MERGE})


def _rope(sections: Sequence[int], **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections), **more}


# family -> (prefix of transformers' classes, text configuration, vision configuration, patch size)
FAMILIES: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, Any], int]] = MappingProxyType(
    {
        "qwen2_vl": (
            "Qwen2VL",
            {**_TEXT, "rope_parameters": _rope((2, 3, 3))},
            {**_VISION, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2, "patch_size": 14},
            14,
        ),
        "qwen2_5_vl": (
            "Qwen2_5_VL",
            {**_TEXT, "rope_parameters": _rope((2, 3, 3))},
            {
                **_VISION,
                "hidden_size": 32,
                "intermediate_size": 48,
                "out_hidden_size": 64,
                "patch_size": 14,
                "window_size": 56,
                "fullatt_block_indexes": [1],
            },
            14,
        ),
        "qwen3_vl": (
            "Qwen3VL",
            {**_TEXT, "head_dim": 16, "rope_parameters": _rope((4, 2, 2), mrope_interleaved=True)},
            {
                **_VISION,
                "hidden_size": 32,
                "intermediate_size": 48,
                "out_hidden_size": 64,
                "patch_size": 16,
                "num_position_embeddings": 36,
                "deepstack_visual_indexes": [0, 1],
            },
            16,
        ),
    }
)


def save_qwen_vl(
    family: str,
    folder: Path,
    *,
    tied: bool = False,
    seed: int = 0,
    text: Mapping[str, Any] = MappingProxyType({}),
    vision: Mapping[str, Any] = MappingProxyType({}),
    max_shard_size: str = "5GB",
) -> Path:
    """A random checkpoint of `family` (a key of `FAMILIES`) with processor settings and tokenizer, as published.

    `text` and `vision` are further fields of the configurations of decoder and encoder.
    """
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    prefix, family_text, family_vision, patch_size = FAMILIES[family]
    config = {
        "text_config": {**family_text, **text, "tie_word_embeddings": tied},
        "vision_config": {**family_vision, **vision},
        "tie_word_embeddings": tied,
        "image_token_id": IMAGE_TOKEN,
        "video_token_id": VIDEO_TOKEN,
        "vision_start_token_id": VISION_START,
        "vision_end_token_id": VISION_END,
    }
    save_random_model(prefix, config, folder, seed, max_shard_size)
    processor = Qwen2VLImageProcessorPil(
        patch_size=patch_size,
        merge_size=MERGE,
        size={"shortest_edge": (patch_size * MERGE) ** 2, "longest_edge": MAX_PIXELS},
    )
    processor.save_pretrained(str(folder))
    return folder


@dataclass
class Reference(VisionReference):
    """The pictures, too, are as transformers' processor makes them."""

    family: str
    folder: Path

    @property
    def class_prefix(self) -> str:
        return FAMILIES[self.family][0]

    @cached_property
    def processor(self) -> Any:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        return Qwen2VLImageProcessorPil.from_pretrained(str(self.folder))

    def picture(self, image: torch.Tensor) -> Picture:
        output = self.processor(images=[image.numpy()], input_data_format="channels_last", return_tensors="pt")
        frames, rows, columns = output["image_grid_thw"][0].tolist()
        num_tokens = rows * columns // MERGE**2
        patches = PixelPatches(output["pixel_values"], (frames, rows, columns))
        ids = (VISION_START, *[IMAGE_TOKEN] * num_tokens, VISION_END)
        return Picture(ids, (Item(patches, num_tokens, (rows // MERGE, columns // MERGE)),))

    def vision_arguments(self, pieces: Sequence[Sequence[int] | Picture]) -> dict[str, torch.Tensor]:
        """Without the token types the model forgets the axes."""
        items = [item for piece in pieces if isinstance(piece, Picture) for item in piece.items]
        if not items:
            return {}
        return {
            "pixel_values": torch.cat([item.patches.pixels for item in items]),
            "image_grid_thw": torch.tensor([item.patches.layout for item in items]),
            "mm_token_type_ids": torch.tensor([[int(token == IMAGE_TOKEN) for token in prompt_ids(pieces)]]),
        }
