"""SigLIP's vision tower (Zhai et al. 2023, arXiv 2303.15343)."""

from collections.abc import Sequence

import torch

from mmserve.vision.vit import PatchEmbedding, VitConfig, VitLayers
from mmserve.weights.layer_loader import LayerLoader

# What a `vision_config` of this kind means where it leaves a number out.
USUAL_SIGLIP = VitConfig(patch_size=16, hidden_act="gelu_pytorch_tanh", layer_norm_eps=1e-6)


class SiglipVit:
    """Pictures of one size in, hidden states of their patches out."""

    def __init__(self, loader: LayerLoader, config: VitConfig, hidden_states: Sequence[int] | None = None) -> None:
        """`hidden_states` are numbered as `hidden_state_numbers` says; None for the last one behind the last norm."""
        self._dtype, self._device, hidden = loader.dtype, loader.device, config.hidden_size
        self._patch_embedding = PatchEmbedding(loader, "vision.embeddings.patch_embedding", config, bias=True)
        self._positions = loader.tensor("vision.embeddings.position_embedding.weight", (config.num_patches, hidden))
        self._norm = None
        if hidden_states is None:
            self._norm = loader.layer_norm("vision.post_layernorm", hidden, config.layer_norm_eps)
        else:
            loader.reader.leave("vision.post_layernorm.")
        self._layers = VitLayers(loader, "vision", config, hidden_states or (config.num_hidden_layers,))
        loader.reader.leave("vision.head.")

    def __call__(self, pixels: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        """`[N, channels, height, width]` -> `[N, patches, hidden * states]`.

        `position_ids`, `[patches]` or `[N, patches]`, are rows of the table of positions where the patches' own order
        is not what counts: pictures of another size than the tower was made for.
        """
        x = self._patch_embedding(pixels.to(self._device, self._dtype))
        x = self._layers(x + (self._positions if position_ids is None else self._positions[position_ids]))
        return x if self._norm is None else self._norm(x)
