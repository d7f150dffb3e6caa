"""Idefics3 and SmolVLM: a Llama decoder behind an encoder of square tiles."""

from collections.abc import Sequence

import torch

from mmserve.attention.base import AttentionBackend
from mmserve.config import ModelConfig
from mmserve.models.decoder import Decoder
from mmserve.vision.idefics3 import Idefics3Encoder
from mmserve.vision.patches import PixelPatches
from mmserve.weights.layer_loader import LayerLoader


class Idefics3(Decoder):
    def __init__(self, loader: LayerLoader, config: ModelConfig, backend: AttentionBackend) -> None:
        super().__init__(loader, config, backend)
        self._encoder = Idefics3Encoder(loader, config.multimodal, config.hidden_size)

    def encode_images(self, patches: Sequence[PixelPatches]) -> list[torch.Tensor]:
        """Per tile `[num_tokens, hidden]`."""
        return self._encoder(patches)
