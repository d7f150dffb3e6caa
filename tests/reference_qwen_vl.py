"""Tiny random checkpoints of the Qwen-VL models, their pictures, and transformers' answers.

Drawn wide, so that a swapped image, a lost window or a wrong axis changes the tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from reference_models import save_reference_tokenizer
from vision_driver import Item, Picture, reference_greedy

from mmserve.vision.patches import PixelPatches

VOCAB_SIZE = 410
VISION_START, VISION_END, IMAGE_TOKEN, VIDEO_TOKEN = 402, 403, 404, 405
TEXT_TOKENS = range(3, 400)
MATRIX_STD = 0.15
VECTOR_STD = 0.2
MERGE = 2
# A page of 1240 x 1754 then takes about 50 tokens.
MAX_PIXELS = 40_000
_TEXT: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
)
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
    vision: Mapping[str, Any] = MappingProxyType({}),
    max_shard_size: str = "5GB",
) -> Path:
    """A random checkpoint of `family` (a key of `FAMILIES`) with processor settings and tokenizer, as published.

    `vision` are further fields of the vision configuration.
    """
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    prefix, text, family_vision, patch_size = FAMILIES[family]
    config = getattr(transformers, f"{prefix}Config")(
        text_config={**text, "tie_word_embeddings": tied},
        vision_config={**family_vision, **vision},
        tie_word_embeddings=tied,
        image_token_id=IMAGE_TOKEN,
        video_token_id=VIDEO_TOKEN,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    )
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config)
    randomize(model, seed)
    model.save_pretrained(str(folder), max_shard_size=max_shard_size)
    save_reference_tokenizer(folder)
    processor = Qwen2VLImageProcessorPil(
        patch_size=patch_size,
        merge_size=MERGE,
        size={"shortest_edge": (patch_size * MERGE) ** 2, "longest_edge": MAX_PIXELS},
    )
    processor.save_pretrained(str(folder))
    return folder


def randomize(model: Any, seed: int) -> None:
    """Queries and keys are drawn wider still: attention that looks everywhere alike would not notice a moved patch."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            is_norm = parameter.ndim == 1 and name.endswith("weight")
            std = MATRIX_STD if parameter.ndim > 1 else VECTOR_STD
            std *= 2 if "q_proj" in name or "k_proj" in name else 1
            parameter.copy_(float(is_norm) + std * torch.randn(parameter.shape, generator=generator))
        model.tie_weights()


@dataclass
class Reference:
    """transformers' model and processor of a folder."""

    family: str
    folder: Path

    @cached_property
    def model(self) -> Any:
        import transformers

        loader = getattr(transformers, f"{FAMILIES[self.family][0]}ForConditionalGeneration")
        return loader.from_pretrained(str(self.folder), dtype=torch.float32, attn_implementation="eager").eval()

    @cached_property
    def processor(self) -> Any:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        return Qwen2VLImageProcessorPil.from_pretrained(str(self.folder))

    def picture(self, image: torch.Tensor) -> Picture:
        """uint8 `[height, width, 3]` -> pixels and placeholders as the reference's processors make them."""
        output = self.processor(images=[image.numpy()], input_data_format="channels_last", return_tensors="pt")
        frames, rows, columns = output["image_grid_thw"][0].tolist()
        num_tokens = rows * columns // MERGE**2
        patches = PixelPatches(output["pixel_values"], (frames, rows, columns))
        ids = (VISION_START, *[IMAGE_TOKEN] * num_tokens, VISION_END)
        return Picture(ids, (Item(patches, num_tokens, (rows // MERGE, columns // MERGE)),))

    def answer(self, pieces: Sequence[Sequence[int] | Picture], num_tokens: int) -> list[int]:
        token_ids, vision = reference_arguments(pieces)
        return reference_greedy(self.model, token_ids, num_tokens, vision)


def reference_arguments(pieces: Sequence[Sequence[int] | Picture]) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Token ids, and what the reference model wants beside them. Without the token types it forgets the axes."""
    token_ids = [token for p in pieces for token in (p.placeholder_ids if isinstance(p, Picture) else p)]
    items = [item for piece in pieces if isinstance(piece, Picture) for item in piece.items]
    if not items:
        return token_ids, {}
    return token_ids, {
        "pixel_values": torch.cat([item.patches.pixels for item in items]),
        "image_grid_thw": torch.tensor([item.patches.layout for item in items]),
        "mm_token_type_ids": torch.tensor([[int(token == IMAGE_TOKEN) for token in token_ids]]),
    }
