"""Finds the image processor of a checkpoint."""

from collections.abc import Mapping
from typing import Any

from mmserve.errors import SetupError
from mmserve.vision.image_plan import ImageProcessor
from mmserve.vision.processors.idefics3 import Idefics3Processor
from mmserve.vision.processors.llava import LlavaProcessor
from mmserve.vision.processors.llava_next import LlavaNextProcessor
from mmserve.vision.processors.llava_onevision import LlavaOnevisionProcessor
from mmserve.vision.processors.qwen import QwenProcessor
from mmserve.weights.checkpoint import Checkpoint
from mmserve.weights.tokenizer import Tokenizer

_Settings = Mapping[str, Any]
_QWEN = ("Qwen2VLImageProcessor", "Qwen2_5_VLImageProcessor", "Qwen3VLImageProcessor")
# By `model_type`: the names of image processors that checkpoints of the family come with.
_IMAGE_PROCESSORS: Mapping[str, tuple[str, ...]] = {
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "llava": ("CLIPImageProcessor", "LlavaImageProcessor", "SiglipImageProcessor"),
    "llava_next": ("LlavaNextImageProcessor",),
    "llava_onevision": ("LlavaOnevisionImageProcessor",),
    "idefics3": ("Idefics3ImageProcessor", "SmolVLMImageProcessor"),
    "smolvlm": ("SmolVLMImageProcessor", "Idefics3ImageProcessor"),
}


def load_processor(checkpoint: Checkpoint, tokenizer: Tokenizer | None = None) -> ImageProcessor | None:
    """The image processor that the checkpoint's files describe; None for a text model.

    Without `tokenizer`, which takes a moment to load, the checkpoint's is read where a family needs it.

    Raises `SetupError` (`model_unavailable`) naming a model type, processor or setting that is not supported.
    """
    config = checkpoint.config
    model_type = str(config.get("model_type"))
    if model_type not in _IMAGE_PROCESSORS:
        if "vision_config" not in config:
            return None
        known = ", ".join(_IMAGE_PROCESSORS)
        raise SetupError("model_unavailable", f"images for {model_type!r} models are not supported; these are: {known}")
    settings = checkpoint.processor_config
    if not settings:
        raise SetupError(
            "model_unavailable", "this model takes images but has no preprocessor_config.json: fetch the model again"
        )
    _check_kind(model_type, settings)
    if model_type in ("idefics3", "smolvlm"):
        return Idefics3Processor.from_settings(settings, config, tokenizer or checkpoint.tokenizer())
    return _build(model_type, settings, config)


def _check_kind(model_type: str, settings: _Settings) -> None:
    kind = settings.get("image_processor_type") or settings.get("feature_extractor_type")
    if kind is None:
        return
    name = str(kind).removesuffix("Fast").removesuffix("Pil").replace("FeatureExtractor", "ImageProcessor")
    if name not in _IMAGE_PROCESSORS[model_type]:
        known = ", ".join(_IMAGE_PROCESSORS[model_type])
        raise SetupError(
            "model_unavailable",
            f"image processor {kind!r} of a {model_type} model is not supported; these are: {known}",
        )


def _build(model_type: str, settings: _Settings, config: _Settings) -> ImageProcessor:
    match model_type:
        case "llava":
            return LlavaProcessor.from_settings(settings, config)
        case "llava_next":
            return LlavaNextProcessor.from_settings(settings, config)
        case "llava_onevision":
            return LlavaOnevisionProcessor.from_settings(settings, config)
        case _:
            return QwenProcessor.from_settings(settings, config)
