"""What the tiny random checkpoints of all vision-language families share, and transformers' answers to their prompts.

Weights are drawn wide, so that a swapped image, a lost window or a wrong axis changes the tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from reference_models import save_reference_tokenizer
from vision_driver import Picture, reference_greedy

from mmserve.vision.image_plan import ImageProcessor
from mmserve.vision.preprocess import load_processor
from mmserve.weights.checkpoint import open_checkpoint

TEXT_TOKENS = range(3, 400)
MATRIX_STD = 0.15
VECTOR_STD = 0.2
TEXT_CONFIG: Mapping[str, Any] = MappingProxyType(
    {
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


def save_random_model(class_prefix: str, config: Mapping[str, Any], folder: Path, seed: int, shard_size: str) -> None:
    """A checkpoint of transformers' model `{class_prefix}ForConditionalGeneration`, with a tokenizer."""
    import transformers

    shape = getattr(transformers, f"{class_prefix}Config")(**config)
    model = getattr(transformers, f"{class_prefix}ForConditionalGeneration")(shape)
    randomize(model, seed)
    model.save_pretrained(str(folder), max_shard_size=shard_size)
    save_reference_tokenizer(folder)


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


class VisionReference(ABC):
    """transformers' model of a folder; and our image processor, which has tests of its own."""

    folder: Path

    @property
    @abstractmethod
    def class_prefix(self) -> str:
        """Of the names of transformers' classes."""

    @abstractmethod
    def picture(self, image: torch.Tensor) -> Picture:
        """uint8 `[height, width, 3]` -> pixels and placeholders."""

    @abstractmethod
    def vision_arguments(self, pieces: Sequence[Sequence[int] | Picture]) -> dict[str, torch.Tensor]:
        """What the model wants beside the token ids of a prompt."""

    @cached_property
    def model(self) -> Any:
        import transformers

        loader = getattr(transformers, f"{self.class_prefix}ForConditionalGeneration")
        return loader.from_pretrained(str(self.folder), dtype=torch.float32, attn_implementation="eager").eval()

    @cached_property
    def processor(self) -> ImageProcessor:
        checkpoint = open_checkpoint(str(self.folder))
        processor = load_processor(checkpoint, checkpoint.tokenizer())
        assert processor is not None
        return processor

    def answer(self, pieces: Sequence[Sequence[int] | Picture], num_tokens: int, **changes: Any) -> list[int]:
        """Greedy tokens; `changes` replace arguments of the model."""
        arguments = {**self.vision_arguments(pieces), **changes}
        return reference_greedy(self.model, prompt_ids(pieces), num_tokens, arguments)


def prompt_ids(pieces: Sequence[Sequence[int] | Picture]) -> list[int]:
    return [token for piece in pieces for token in (piece.placeholder_ids if isinstance(piece, Picture) else piece)]
