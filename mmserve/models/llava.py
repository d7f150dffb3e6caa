"""LLaVA-1.5 (Liu et al. 2023, arXiv 2310.03744): a decoder behind a tower that takes a picture as one square."""

from collections.abc import Sequence

import torch

from mmserve.attention.base import AttentionBackend
from mmserve.config import ModelConfig
from mmserve.models.decoder import Decoder
from mmserve.vision.patches import PixelPatches
from mmserve.vision.square_features import SquareFeatures, SquareFeaturesConfig
from mmserve.weights.layer_loader import LayerLoader


class Llava(Decoder):
    def __init__(self, loader: LayerLoader, config: ModelConfig, backend: AttentionBackend) -> None:
        features = self._features_config(config)
        super().__init__(loader, config, backend)
        self._features = SquareFeatures(loader, features, config.hidden_size)

    def _features_config(self, config: ModelConfig) -> SquareFeaturesConfig:
        return SquareFeaturesConfig.from_hf(config.multimodal)

    def encode_images(self, patches: Sequence[PixelPatches]) -> list[torch.Tensor]:
        """Per image `[num_tokens, hidden]`."""
        return list(self._features(torch.cat([image.pixels for image in patches])))
