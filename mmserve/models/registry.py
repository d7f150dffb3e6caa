"""Which architectures are served, and by which class."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from mmserve.errors import SetupError
from mmserve.models.decoder import Decoder
from mmserve.vision.patches import PixelPatches


@runtime_checkable
class VisionLanguageModel(Protocol):
    """A decoder with a vision encoder in front."""

    def encode_images(self, patches: Sequence[PixelPatches]) -> list[torch.Tensor]:
        """All images as one packed batch -> `[num_tokens, hidden]` each, deepstack features side by side after it."""


_ARCHITECTURES = {
    "LlamaForCausalLM": Decoder,
    "MistralForCausalLM": Decoder,
    "Qwen2ForCausalLM": Decoder,
    "Qwen3ForCausalLM": Decoder,
}


def model_class(architecture: str) -> type[Decoder]:
    """`SetupError` (`model_unavailable`) lists what is served if `architecture` is not."""
    if architecture not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise SetupError("model_unavailable", f"architecture {architecture!r} is not supported; these are: {known}")
    return _ARCHITECTURES[architecture]
