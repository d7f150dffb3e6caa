"""Tiny random checkpoints of Idefics3 and SmolVLM, their pictures, and transformers' answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from reference_models import save_reference_tokenizer
from reference_qwen_vl import randomize
from vision_driver import Item, Picture, reference_greedy

from mmserve.vision.preprocess import ImageProcessor, PixelLimits, load_processor
from mmserve.weights.checkpoint import open_checkpoint

MARKUP = (
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)
IMAGE_TOKEN = 400
VOCAB_SIZE = IMAGE_TOKEN + len(MARKUP)
TEXT_TOKENS = range(3, IMAGE_TOKEN)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXT: Mapping[str, Any] = MappingProxyType(
    {
        "model_type": "llama",
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
    config = getattr(transformers, f"{shape.prefix}Config")(
        text_config={**_TEXT, "tie_word_embeddings": tied},
        vision_config={**_VISION, "image_size": shape.side, "patch_size": shape.patch_size, **vision},
        tie_word_embeddings=tied,
        image_token_id=IMAGE_TOKEN,
        scale_factor=shape.scale_factor,
    )
    model = getattr(transformers, f"{shape.prefix}ForConditionalGeneration")(config)
    randomize(model, seed)
    model.save_pretrained(str(folder), max_shard_size=max_shard_size)
    _save_tokenizer(folder)
    processor = getattr(transformers, f"{shape.prefix}ImageProcessorPil")(
        size={"longest_edge": shape.tiles * shape.side}, max_image_size={"longest_edge": shape.side}
    )
    processor.save_pretrained(str(folder))
    return folder


def _save_tokenizer(folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    save_reference_tokenizer(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKUP)})
    tokenizer.chat_template = CHAT_TEMPLATE
    assert tokenizer.convert_tokens_to_ids("<image>") == IMAGE_TOKEN
    tokenizer.save_pretrained(str(folder))


@dataclass
class Reference:
    """transformers' model of a folder, and our processor, which has tests of its own."""

    family: str
    folder: Path

    @cached_property
    def model(self) -> Any:
        import transformers

        loader = getattr(transformers, f"{FAMILIES[self.family].prefix}ForConditionalGeneration")
        return loader.from_pretrained(str(self.folder), dtype=torch.float32, attn_implementation="eager").eval()

    @cached_property
    def processor(self) -> ImageProcessor:
        checkpoint = open_checkpoint(str(self.folder))
        processor = load_processor(checkpoint, checkpoint.tokenizer())
        assert processor is not None
        return processor

    def picture(self, image: torch.Tensor, limits: PixelLimits | None = None) -> Picture:
        """uint8 `[height, width, 3]` -> an item a tile, and the text between them."""
        plan = self.processor.plan(image.shape[1], image.shape[0], limits or PixelLimits())
        patches = self.processor.process(image, plan)
        items = [Item(tile, item.num_tokens) for tile, item in zip(patches, plan.items, strict=True)]
        return Picture(self.processor.placeholder_ids(plan), items)

    def answer(self, pieces: Sequence[Sequence[int] | Picture], num_tokens: int) -> list[int]:
        token_ids, vision = reference_arguments(pieces)
        return reference_greedy(self.model, token_ids, num_tokens, vision)


def reference_arguments(pieces: Sequence[Sequence[int] | Picture]) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Token ids, and what the reference model wants beside them."""
    token_ids = [token for p in pieces for token in (p.placeholder_ids if isinstance(p, Picture) else p)]
    tiles = [item.patches.pixels for piece in pieces if isinstance(piece, Picture) for item in piece.items]
    return token_ids, {"pixel_values": torch.cat(tiles)[None]} if tiles else {}
