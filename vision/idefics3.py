"""The encoder of Idefics3 (Laurençon et al. 2024, arXiv 2408.12637) and SmolVLM (Marafioti et al. 2025, arXiv
2504.05299): a SigLIP tower over square tiles, and squares of neighbouring patches that become one token.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from mmserve.vision.patches import PixelPatches
from mmserve.vision.siglip import SiglipVit
from mmserve.vision.vit import VitConfig
from mmserve.weights.layer_loader import LayerLoader

# What a `vision_config` of this kind means where it leaves a number out.
USUAL_IDEFICS3 = VitConfig(
    hidden_size=1152, num_attention_heads=16, patch_size=32, hidden_act="gelu_pytorch_tanh", layer_norm_eps=1e-6
)
_USUAL_SCALE_FACTOR = 2
_ALMOST_ONE = 1.0 - 1e-6


class Idefics3Encoder:
    def __init__(self, loader: LayerLoader, config: Mapping[str, Any], out_size: int) -> None:
        """`config` is a `config.json`; `out_size` is the decoder's."""
        self._config = USUAL_IDEFICS3.updated(config["vision_config"])
        self._factor = config.get("scale_factor", _USUAL_SCALE_FACTOR)
        self._device = loader.device
        self._tower = SiglipVit(loader, self._config)
        in_size = self._config.hidden_size * self._factor**2
        self._projection = loader.linear(["projector.modality_projection.proj"], in_size, (out_size,), bias=False)

    def __call__(self, tiles: Sequence[PixelPatches]) -> list[torch.Tensor]:
        """Pixels `[1, channels, side, side]`, all of one side and all picture -> `[num_tokens, out_size]` each."""
        pixels = torch.cat([tile.pixels for tile in tiles])
        patches_a_side = pixels.shape[-1] // self._config.patch_size
        positions_a_side = self._config.image_size // self._config.patch_size
        features = self._tower(pixels, position_ids(patches_a_side, positions_a_side, self._device))
        squares = self._squares(features, patches_a_side)
        return list(self._projection(squares.flatten(0, 1)).view(len(tiles), squares.shape[1], -1))

    def _squares(self, features: torch.Tensor, patches_a_side: int) -> torch.Tensor:
        """Pixel shuffle: `[N, patches, hidden]` -> `[N, patches / factor^2, hidden * factor^2]`."""
        num_tiles, _, size = features.shape
        factor, count = self._factor, patches_a_side // self._factor
        blocks = features.view(num_tiles, count, factor, count, factor, size)
        return blocks.transpose(2, 3).reshape(num_tiles, count**2, factor**2 * size)


@lru_cache(maxsize=64)
def position_ids(
    patches_a_side: int,
    positions_a_side: int,
    device: torch.device = torch.device("cpu"),  # noqa: B008
) -> torch.Tensor:
    """Where a square tile's patches stand in the square table of learned positions, `[patches_a_side^2]`.

    By fractions of the side (NaViT, Dehghani et al. 2023, arXiv 2307.06304), in float32 on the CPU as published models
    were trained: one that falls on a bound must fall to the same side of it.
    """
    bounds = torch.arange(1 / positions_a_side, 1.0, 1 / positions_a_side)
    fractions = torch.arange(patches_a_side, dtype=torch.float32) * (1.0 / torch.tensor(patches_a_side))
    steps = torch.bucketize(fractions.clamp(max=_ALMOST_ONE), bounds, right=True)
    return (steps[:, None] * positions_a_side + steps).flatten().to(device)
