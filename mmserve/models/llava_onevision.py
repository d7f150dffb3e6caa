"""LLaVA-OneVision (Li et al. 2024, arXiv 2408.03326): tiles as in LLaVA-NeXT, scaled down where they are many."""

from typing import ClassVar

import torch
import torch.nn.functional as F

from mmserve.attention.base import AttentionBackend
from mmserve.config import ModelConfig
from mmserve.models.llava_next import LlavaNext, with_a_token_a_patch
from mmserve.vision.anyres import Resolution, pooled_size
from mmserve.vision.processors import llava_onevision
from mmserve.vision.square_features import SquareFeaturesConfig
from mmserve.weights.layer_loader import LayerLoader


class LlavaOnevision(LlavaNext):
    default_resolutions: ClassVar[tuple[Resolution, ...]] = llava_onevision.RESOLUTIONS

    def __init__(self, loader: LayerLoader, config: ModelConfig, backend: AttentionBackend) -> None:
        super().__init__(loader, config, backend)
        self._max_tiles = llava_onevision.read_max_tiles(config.multimodal)

    def _features_config(self, config: ModelConfig) -> SquareFeaturesConfig:
        return with_a_token_a_patch(
            SquareFeaturesConfig.from_hf(config.multimodal, layer=-1, strategy="full", tower="siglip_vision_model")
        )

    def _scaled(self, picture: torch.Tensor) -> torch.Tensor:
        size = pooled_size(picture.shape[0], picture.shape[1], self._side, self._max_tiles)
        if size == tuple(picture.shape[:2]):
            return picture
        return F.interpolate(picture.permute(2, 0, 1)[None], size, mode="bilinear")[0].permute(1, 2, 0)
