"""Which architectures are served, and by which class."""

from mmserve.errors import SetupError
from mmserve.models.decoder import Decoder

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
