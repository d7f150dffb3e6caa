"""Reading the settings that image processors share, in the forms that checkpoints have them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from mmserve.errors import SetupError
from mmserve.vision.resize import Filter

Settings = Mapping[str, Any]
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)
_PILLOW_FILTERS: dict[int, Filter] = {1: "lanczos", 2: "bilinear", 3: "bicubic"}


@dataclass(frozen=True)
class Normalisation:
    """Bytes times `scale`, less `mean`, over `std`, a channel each."""

    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        """uint8 `[height, width, 3]` -> float32 `[3, height, width]`."""
        factors, offsets = _affine(self, image.device)
        return image.permute(2, 0, 1).float().mul_(factors).add_(offsets)


@lru_cache(maxsize=16)
def _affine(normalise: Normalisation, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """What bytes are multiplied by, and what is added then: `[3, 1, 1]` each."""
    factors = [normalise.scale / std for std in normalise.std]
    offsets = [-mean / std for mean, std in zip(normalise.mean, normalise.std, strict=True)]
    return torch.tensor(factors, device=device)[:, None, None], torch.tensor(offsets, device=device)[:, None, None]


def read_normalisation(settings: Settings, mean: Sequence[float], std: Sequence[float]) -> Normalisation:
    """`mean` and `std` are what the family's processor has where the checkpoint says nothing."""
    scale = float(_get(settings, "rescale_factor", 1 / 255)) if _get(settings, "do_rescale", True) else 1.0
    if not _get(settings, "do_normalize", True):
        return Normalisation(scale, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    return Normalisation(
        scale,
        tuple(float(value) for value in _get(settings, "image_mean", mean)),
        tuple(float(value) for value in _get(settings, "image_std", std)),
    )


def read_filter(settings: Settings, default: Filter) -> Filter:
    """`SetupError` for one that is not served, and for a processor that does not resize at all."""
    if not _get(settings, "do_resize", True):
        raise unsupported("do_resize: false")
    number = settings.get("resample")
    if number is None:
        return default
    if number not in _PILLOW_FILTERS:
        raise unsupported(f"resample: {number}")
    return _PILLOW_FILTERS[number]


def read_square(settings: Settings, name: str, default: int) -> int:
    """The side of `{"height": 384, "width": 384}`, `{"shortest_edge": 336}`, `{"longest_edge": 512}` or a number."""
    value = _get(settings, name, default)
    if not isinstance(value, Mapping):
        return int(value)
    sides = {int(side) for side in value.values() if side is not None}
    if len(sides) != 1:
        raise unsupported(f"{name}: {dict(value)}")
    return sides.pop()


def unsupported(setting: str) -> SetupError:
    return SetupError(
        "model_unavailable", f"preprocessor_config.json has {setting}, which is not supported: use another checkpoint"
    )


def image_token_id(config: Settings, default: int) -> int:
    """Of `config.json`, under its new or its old name."""
    return int(config.get("image_token_id", config.get("image_token_index", default)))


@dataclass(frozen=True)
class EncoderShape:
    """What counts of a CLIP or SigLIP encoder: sides of its square pictures and patches, a class token before them."""

    image_size: int
    patch_size: int
    has_class_token: bool

    def patches_a_side(self, tile_size: int) -> int:
        """`SetupError` where the processor makes other pictures than the encoder takes."""
        if self.image_size != tile_size:
            raise unsupported(f"pictures of {tile_size} pixels, while the encoder takes {self.image_size}")
        return tile_size // self.patch_size


CLIP_336 = EncoderShape(336, 14, has_class_token=True)
SIGLIP_384 = EncoderShape(384, 14, has_class_token=False)
# What a `vision_config` means where it leaves a number out; transformers writes only what differs.
_ENCODERS = {
    "clip_vision_model": EncoderShape(224, 32, has_class_token=True),
    "siglip_vision_model": EncoderShape(224, 16, has_class_token=False),
}


def read_encoder(config: Settings, default: EncoderShape) -> EncoderShape:
    """Of `config.json`; `default` is the family's encoder, for a file that does not speak of one."""
    vision = config.get("vision_config")
    if not vision:
        return default
    kind = vision.get("model_type", "clip_vision_model" if default.has_class_token else "siglip_vision_model")
    if kind not in _ENCODERS:
        raise SetupError("model_unavailable", f"vision encoder {kind!r} is not supported; CLIP and SigLIP are")
    usual = _ENCODERS[kind]
    return EncoderShape(
        int(vision.get("image_size", usual.image_size)),
        int(vision.get("patch_size", usual.patch_size)),
        usual.has_class_token,
    )


def _get(settings: Settings, name: str, default: Any) -> Any:
    value = settings.get(name)
    return default if value is None else value
