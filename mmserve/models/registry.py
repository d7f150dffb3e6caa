"""Which architectures are served, and by which class."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch

from mmserve.attention.base import AttentionBackend
from mmserve.attention.context import ForwardContext
from mmserve.config import ModelConfig
from mmserve.errors import SetupError
from mmserve.models.decoder import Decoder
from mmserve.models.idefics3 import Idefics3
from mmserve.models.llava import Llava
from mmserve.models.llava_next import LlavaNext
from mmserve.models.llava_onevision import LlavaOnevision
from mmserve.models.qwen_vl import QwenVL
from mmserve.vision.patches import PixelPatches
from mmserve.weights.layer_loader import LayerLoader


class LanguageModel(Protocol):
    """What a step needs of a model; `Decoder` says what each does."""

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor: ...

    def forward(
        self, x: torch.Tensor, context: ForwardContext, deepstack: Sequence[torch.Tensor] = ()
    ) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


@runtime_checkable
class VisionLanguageModel(Protocol):
    """A decoder with a vision encoder in front."""

    def encode_images(self, patches: Sequence[PixelPatches]) -> list[torch.Tensor]:
        """All images as one packed batch -> `[num_tokens, hidden]` each, deepstack features side by side after it."""


ModelClass = Callable[[LayerLoader, ModelConfig, AttentionBackend], LanguageModel]

_ARCHITECTURES: Mapping[str, ModelClass] = {
    "LlamaForCausalLM": Decoder,
    "MistralForCausalLM": Decoder,
    "Qwen2ForCausalLM": Decoder,
    "Qwen3ForCausalLM": Decoder,
    "LlavaForConditionalGeneration": Llava,
    "LlavaNextForConditionalGeneration": LlavaNext,
    "LlavaOnevisionForConditionalGeneration": LlavaOnevision,
    "Qwen2VLForConditionalGeneration": QwenVL,
    "Qwen2_5_VLForConditionalGeneration": QwenVL,
    "Qwen3VLForConditionalGeneration": QwenVL,
    "Idefics3ForConditionalGeneration": Idefics3,
    "SmolVLMForConditionalGeneration": Idefics3,
}


def model_class(architecture: str) -> ModelClass:
    """`SetupError` (`model_unavailable`) lists what is served if `architecture` is not."""
    if architecture not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise SetupError("model_unavailable", f"architecture {architecture!r} is not supported; these are: {known}")
    return _ARCHITECTURES[architecture]
