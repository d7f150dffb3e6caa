"""The encoder of the LLaVA models: a CLIP or SigLIP tower over squares, what counts of its features, a projector."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mmserve.errors import SetupError
from mmserve.vision.clip import USUAL_CLIP, ClipVit
from mmserve.vision.projector import Projector
from mmserve.vision.siglip import USUAL_SIGLIP, SiglipVit
from mmserve.vision.vit import VitConfig, hidden_state_numbers
from mmserve.weights.layer_loader import LayerLoader

_USUAL = {"clip_vision_model": USUAL_CLIP, "siglip_vision_model": USUAL_SIGLIP}


@dataclass(frozen=True, kw_only=True)
class SquareFeaturesConfig:
    """`hidden_states` of the tower count, side by side; of each the first token is dropped if `drops_first`."""

    tower: VitConfig
    has_class_token: bool
    hidden_states: tuple[int, ...]
    drops_first: bool
    projector_act: str
    projector_bias: bool

    @property
    def num_tokens(self) -> int:
        """Of one square."""
        return self.tower.num_patches + self.has_class_token - self.drops_first

    @classmethod
    def from_hf(
        cls,
        config: Mapping[str, Any],
        *,
        layer: int = -2,
        strategy: str = "default",
        tower: str = "clip_vision_model",
    ) -> "SquareFeaturesConfig":
        """From a `config.json`; `layer`, `strategy` and `tower` are what the family means where it does not say.

        `SetupError` naming a tower, layer or strategy that is not supported.
        """
        vision = config["vision_config"]
        kind = vision.get("model_type", tower)
        if kind not in _USUAL:
            raise SetupError("model_unavailable", f"vision encoder {kind!r} is not supported; CLIP and SigLIP are")
        strategy = config.get("vision_feature_select_strategy", strategy)
        if strategy not in ("default", "full"):
            raise SetupError("model_unavailable", f"vision_feature_select_strategy {strategy!r} is not supported")
        shape = _USUAL[kind].updated(vision)
        return cls(
            tower=shape,
            has_class_token=kind == "clip_vision_model",
            hidden_states=hidden_state_numbers(config.get("vision_feature_layer", layer), shape.num_hidden_layers),
            drops_first=strategy == "default",
            projector_act=config.get("projector_hidden_act", "gelu"),
            projector_bias=config.get("multimodal_projector_bias", True),
        )


class SquareFeatures:
    def __init__(self, loader: LayerLoader, config: SquareFeaturesConfig, out_size: int) -> None:
        tower = ClipVit if config.has_class_token else SiglipVit
        self._tower = tower(loader, config.tower, config.hidden_states)
        self._first_token = int(config.drops_first)
        in_size = config.tower.hidden_size * len(config.hidden_states)
        self._projector = Projector(loader, in_size, out_size, act=config.projector_act, bias=config.projector_bias)

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """Squares `[N, channels, side, side]` -> `[N, num_tokens, out_size]`."""
        features = self._tower(pixels)[:, self._first_token :]
        return self._projector(features.flatten(0, 1)).view(*features.shape[:2], -1)
