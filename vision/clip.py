"""CLIP's vision tower (Radford et al. 2021, arXiv 2103.00020)."""

from collections.abc import Sequence

import torch

from mmserve.vision.vit import PatchEmbedding, VitConfig, VitLayers
from mmserve.weights.layer_loader import LayerLoader

# What a `vision_config` of this kind means where it leaves a number out.
USUAL_CLIP = VitConfig(patch_size=32, hidden_act="quick_gelu", layer_norm_eps=1e-5)


class ClipVit:
    """Square pictures in, hidden states of a class token and of the patches out."""

    def __init__(self, loader: LayerLoader, config: VitConfig, hidden_states: Sequence[int]) -> None:
        """`hidden_states` are numbered as `hidden_state_numbers` says."""
        self._dtype, self._device, hidden = loader.dtype, loader.device, config.hidden_size
        self._patch_embedding = PatchEmbedding(loader, "vision.embeddings.patch_embedding", config, bias=False)
        self._class_embedding = loader.tensor("vision.embeddings.class_embedding", (hidden,))
        self._positions = loader.tensor("vision.embeddings.position_embedding.weight", (config.num_patches + 1, hidden))
        # Misspelt in every checkpoint.
        self._norm = loader.layer_norm("vision.pre_layrnorm", hidden, config.layer_norm_eps)
        self._layers = VitLayers(loader, "vision", config, hidden_states)
        loader.reader.leave("vision.post_layernorm.")

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """`[N, channels, side, side]` -> `[N, 1 + patches, hidden * states]`, the class token first."""
        patches = self._patch_embedding(pixels.to(self._device, self._dtype))
        class_tokens = self._class_embedding.expand(patches.shape[0], 1, -1)
        x = torch.cat((class_tokens, patches), dim=1) + self._positions
        return self._layers(self._norm(x))
