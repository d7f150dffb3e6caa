"""From what a checkpoint says of itself, and what its user asks for, to a scheme."""

from collections.abc import Callable, Mapping
from typing import Any

from mmserve.config import QuantizationName
from mmserve.errors import SetupError
from mmserve.quantization.awq import AwqScheme
from mmserve.quantization.compressed_tensors import CompressedTensorsScheme
from mmserve.quantization.fp8 import Fp8OnTheFly, Fp8Scheme
from mmserve.quantization.gptq import GptqScheme
from mmserve.quantization.scheme import QuantizationScheme

_SCHEMES: Mapping[str, Callable[[Mapping[str, Any]], QuantizationScheme]] = {
    "awq": AwqScheme,
    "gptq": GptqScheme,
    "fp8": Fp8Scheme,
    "compressed-tensors": CompressedTensorsScheme,
}


def quantization_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The part of a `config.json` that says how the decoder's weights are stored; None in full precision."""
    for part in (config, config.get("text_config") or {}):
        for key in ("quantization_config", "compression_config"):
            if part.get(key):
                found: Mapping[str, Any] = part[key]
                return found
    return None


def choose_scheme(config: Mapping[str, Any], asked: QuantizationName) -> QuantizationScheme | None:
    """None for a model in full precision. Raises `SetupError` for what is not served, or is not what was asked for."""
    stored = quantization_config(config)
    if stored is None:
        if asked == "fp8":
            return Fp8OnTheFly()
        if asked != "auto":
            raise SetupError(
                "model_unavailable",
                f"--quantization {asked} is for checkpoints that are stored so, and this one is in full precision: "
                "take fp8, or make one with `mmserve quantize`",
                param="quantization",
            )
        return None
    method = str(stored.get("quant_method", "compressed-tensors" if "config_groups" in stored else "?")).lower()
    if method not in _SCHEMES:
        raise SetupError(
            "model_unavailable",
            f"the checkpoint is quantized by {method!r}, which is not served: {', '.join(_SCHEMES)} are",
        )
    if asked not in ("auto", method):
        raise SetupError(
            "model_unavailable",
            f"--quantization {asked} does not fit a checkpoint that is stored as {method}: leave the option out",
            param="quantization",
        )
    return _SCHEMES[method](stored)
