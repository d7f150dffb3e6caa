"""Tiny random checkpoints of Idefics3 and SmolVLM, their pictures, and transformers' answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from vision_driver import Item, Picture
from vision_reference import TEXT_CONFIG, TEXT_TOKENS, VisionReference, save_random_model

from mmserve.vision.image_source import PixelLimits

MARKUP = (
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)
IMAGE_TOKEN = TEXT_TOKENS.stop
VOCAB_SIZE = IMAGE_TOKEN + len(MARKUP)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXT: Mapping[str, Any] = MappingProxyType({"model_type": "llama", "vocab_size": VOCAB_SIZE, **TEXT_CONFIG})
_VISION: Mapping[str, Any] = MappingProxyType(
    {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
)


@dataclass(frozen=True)
class Family:
    """`side` of a tile, of its patches and of the squares of patches that become a token; tiles of the longer edge."""

    prefix: str
    side: int
    patch_size: int
    scale_factor: int
    tiles: int


# SmolVLM's tile is no whole number of patches, as that of SmolVLM-Instruct (384 pixels, patches of 14).
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {"idefics3": Family("Idefics3", 56, 14, 2, 3), "smolvlm": Family("SmolVLM", 100, 8, 4, 2)}
)


def save_idefics3(
    family: str,
    folder: Path,
    *,
    tied: bool = False,
    seed: int = 0,
    vision: Mapping[str, Any] = MappingProxyType({}),
    max_shard_size: str = "5GB",
) -> Path:
    """A random checkpoint of `family` (a key of `FAMILIES`) with processor settings and tokenizer, as published."""
    import transformers

    shape = FAMILIES[family]
    config = {
        "text_config": {**_TEXT, "tie_word_embeddings": tied},
        "vision_config": {**_VISION, "image_size": shape.side, "patch_size": shape.patch_size, **vision},
        "tie_word_embeddings": tied,
        "image_token_id": IMAGE_TOKEN,
        "scale_factor": shape.scale_factor,
    }
    save_random_model(shape.prefix, config, folder, seed, max_shard_size)
    _add_markup(folder)
    processor = getattr(transformers, f"{shape.prefix}ImageProcessorPil")(
        size={"longest_edge": shape.tiles * shape.side}, max_image_size={"longest_edge": shape.side}
    )
    processor.save_pretrained(str(folder))
    return folder


def _add_markup(folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKUP)})
    tokenizer.chat_template = CHAT_TEMPLATE
    assert tokenizer.convert_tokens_to_ids("<image>") == IMAGE_TOKEN
    tokenizer.save_pretrained(str(folder))


@dataclass
class Reference(VisionReference):
    family: str
    folder: Path

    @property
    def class_prefix(self) -> str:
        return FAMILIES[self.family].prefix

    def picture(self, image: torch.Tensor, limits: PixelLimits | None = None) -> Picture:
        """uint8 `[height, width, 3]` -> an item a tile, and the text between them."""
        plan = self.processor.plan(image.shape[1], image.shape[0], limits or PixelLimits())
        patches = self.processor.process(image, plan)
        items = [Item(tile, item.num_tokens) for tile, item in zip(patches, plan.items, strict=True)]
        return Picture(self.processor.placeholder_ids(plan), items)

    def vision_arguments(self, pieces: Sequence[Sequence[int] | Picture]) -> dict[str, torch.Tensor]:
        tiles = [item.patches.pixels for piece in pieces if isinstance(piece, Picture) for item in piece.items]
        return {"pixel_values": torch.cat(tiles)[None]} if tiles else {}
