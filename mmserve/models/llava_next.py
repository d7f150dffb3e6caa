"""LLaVA-NeXT (1.6; Liu et al. 2024): an overview of a picture, and its tiles put together again without the padding."""

from collections.abc import Sequence
from typing import ClassVar

import torch

from mmserve.attention.base import AttentionBackend
from mmserve.config import ModelConfig
from mmserve.errors import SetupError
from mmserve.models.llava import Llava
from mmserve.vision.anyres import Resolution, grid_of_tiles, unpadded_size
from mmserve.vision.patches import PixelPatches
from mmserve.vision.processors import llava_next
from mmserve.vision.square_features import SquareFeaturesConfig
from mmserve.weights.layer_loader import LayerLoader


class LlavaNext(Llava):
    """A picture's tokens: those of the overview, then rows over all tiles, each with a learned newline at its end."""

    default_resolutions: ClassVar[tuple[Resolution, ...]] = llava_next.RESOLUTIONS

    def __init__(self, loader: LayerLoader, config: ModelConfig, backend: AttentionBackend) -> None:
        super().__init__(loader, config, backend)
        tower = self._features_config(config).tower
        self._tile_size, self._side = tower.image_size, tower.image_size // tower.patch_size
        self._resolutions = llava_next.read_resolutions(config.multimodal, self.default_resolutions)
        self._newline = loader.tensor("projector.image_newline", (config.hidden_size,))

    def _features_config(self, config: ModelConfig) -> SquareFeaturesConfig:
        return with_a_token_a_patch(SquareFeaturesConfig.from_hf(config.multimodal))

    def encode_images(self, patches: Sequence[PixelPatches]) -> list[torch.Tensor]:
        """Per image `[num_tokens, hidden]`. Pixels `[tiles, 3, side, side]`, layout (height, width) of the original."""
        tokens = self._features(torch.cat([image.pixels for image in patches]))
        images = torch.split(tokens, [image.pixels.shape[0] for image in patches])
        return [self._assembled(tiles, *image.layout) for tiles, image in zip(images, patches, strict=True)]

    def _assembled(self, tiles: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """`[1 + tiles, patches, hidden]` -> `[num_tokens, hidden]`."""
        overview = tiles[0]
        if tiles.shape[0] == 1:
            return torch.cat((overview, self._newline[None]))
        picture = self._scaled(_unpadded(self._joined(tiles, height, width), height, width))
        newlines = self._newline.expand(picture.shape[0], 1, -1)
        return torch.cat((overview, torch.cat((picture, newlines), dim=1).flatten(0, 1)))

    def _joined(self, tiles: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """The tiles behind the overview as one picture, `[rows, columns, hidden]`."""
        grid, side = grid_of_tiles(height, width, self._resolutions, self._tile_size, tiles.shape[0]), self._side
        assert grid.num_tiles == tiles.shape[0], "image_grid_pinpoints of the processor are those of the model"
        picture = tiles[1:].view(grid.rows, grid.columns, side, side, -1).transpose(1, 2)
        return picture.reshape(grid.rows * side, grid.columns * side, -1)

    def _scaled(self, picture: torch.Tensor) -> torch.Tensor:
        return picture


def _unpadded(picture: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """The middle of `[rows, columns, hidden]` that a picture of `height` x `width` takes."""
    rows, columns = unpadded_size(picture.shape[0], picture.shape[1], height, width)
    top, left = (picture.shape[0] - rows) // 2, (picture.shape[1] - columns) // 2
    return picture[top : top + rows, left : left + columns]


def with_a_token_a_patch(features: SquareFeaturesConfig) -> SquareFeaturesConfig:
    if features.num_tokens != features.tower.num_patches:
        raise SetupError(
            "model_unavailable",
            "vision_feature_select_strategy of config.json does not fit the vision tower: tiles need one token a patch",
        )
    return features
