"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: a Qwen decoder behind an encoder of images of any size."""

from collections.abc import Sequence

import torch

from mmserve.attention.base import AttentionBackend
from mmserve.config import ModelConfig
from mmserve.models.decoder import Decoder
from mmserve.vision.patches import PixelPatches
from mmserve.vision.qwen_vit import QwenVit, QwenVitConfig
from mmserve.weights.layer_loader import LayerLoader


class QwenVL(Decoder):
    def __init__(self, loader: LayerLoader, config: ModelConfig, backend: AttentionBackend) -> None:
        assert config.vision is not None
        super().__init__(loader, config, backend)
        self._encoder = QwenVit(loader, QwenVitConfig.from_hf(config.multimodal["model_type"], config.vision))

    def encode_images(self, patches: Sequence[PixelPatches]) -> list[torch.Tensor]:
        """Per image `[num_tokens, hidden]`, for Qwen3-VL followed by the deepstack features of each layer."""
        return self._encoder(patches)
