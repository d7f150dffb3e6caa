"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: any size in whole merged patches, between two pixel budgets."""

import math
from dataclasses import dataclass

import torch

from mmserve.vision.image_plan import ImagePlan, ItemPlan, check_shape
from mmserve.vision.image_source import PixelLimits
from mmserve.vision.patches import PixelPatches
from mmserve.vision.processors.settings import (
    CLIP_MEAN,
    CLIP_STD,
    Normalisation,
    Settings,
    image_token_id,
    read_filter,
    read_normalisation,
)
from mmserve.vision.resize import Filter, resize


@dataclass(frozen=True)
class QwenProcessor:
    """One item a picture: patches in the order in which the encoder merges them, layout (1, rows, columns)."""

    image_token_id: int
    patch_size: int
    merge_size: int
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int
    resample: Filter
    normalise: Normalisation

    @classmethod
    def from_settings(cls, settings: Settings, config: Settings) -> "QwenProcessor":
        size = settings.get("size") or {}
        vision = config.get("vision_config", {})
        return cls(
            image_token_id(config, 151655),
            int(settings.get("patch_size") or vision.get("patch_size", 14)),
            int(settings.get("merge_size") or vision.get("spatial_merge_size", 2)),
            int(settings.get("temporal_patch_size") or vision.get("temporal_patch_size", 2)),
            int(settings.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels") or 56 * 56),
            int(settings.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels") or 28 * 28 * 1280),
            read_filter(settings, "bicubic"),
            read_normalisation(settings, CLIP_MEAN, CLIP_STD),
        )

    def plan(self, width: int, height: int, limits: PixelLimits) -> ImagePlan:
        check_shape(width, height)
        max_pixels = limits.max_pixels or self.max_pixels
        min_pixels = min(limits.min_pixels or self.min_pixels, max_pixels)
        factor = self.patch_size * self.merge_size
        new_width, new_height = fit_pixels(width, height, factor, min_pixels, max_pixels)
        grid = (new_height // factor, new_width // factor)
        layout = (1, new_height // self.patch_size, new_width // self.patch_size)
        return ImagePlan(width, height, (ItemPlan(grid[0] * grid[1], grid, layout),))

    def placeholder_ids(self, plan: ImagePlan) -> list[int]:
        return [self.image_token_id] * plan.num_tokens

    def process(self, image: torch.Tensor, plan: ImagePlan) -> list[PixelPatches]:
        assert image.shape == (plan.height, plan.width, 3)
        _, rows, columns = plan.items[0].layout
        resized = resize(image, (rows * self.patch_size, columns * self.patch_size), self.resample)
        return [PixelPatches(self._patches(resized, rows, columns), plan.items[0].layout)]

    def _patches(self, image: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """`[height, width, 3]` -> `[patches, 3 * time * patch * patch]`; a picture repeats in time."""
        merge, patch, time = self.merge_size, self.patch_size, self.temporal_patch_size
        shape = (rows // merge, columns // merge, merge, merge, 3, time, patch, patch)
        patches = torch.empty(shape, device=image.device)
        # On a CPU a row of merged patches at a time stays in the cache; a GPU is faster with all of them.
        step = 1 if image.device.type == "cpu" else rows // merge
        height = merge * patch
        for first in range(0, rows // merge, step):
            strip = self.normalise(image[first * height : (first + step) * height])
            cut = strip.view(3, step, merge, patch, columns // merge, merge, patch)
            patches[first : first + step] = cut.permute(1, 4, 2, 5, 0, 3, 6).unsqueeze(5)
        return patches.view(rows * columns, -1)


def fit_pixels(width: int, height: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Width and height in whole `factor`s, near the aspect ratio, within the budgets (`smart_resize` of Qwen).

    Where that oversteps `max_pixels` (a thin picture, a budget of few patches), the longer side gives in.
    """
    new_width, new_height = _rounded(width, factor), _rounded(height, factor)
    if new_width * new_height > max_pixels:
        return _shrunk(width, height, factor, max_pixels)
    if new_width * new_height < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        new_width, new_height = math.ceil(width * scale / factor) * factor, math.ceil(height * scale / factor) * factor
        if new_width * new_height > max_pixels:
            return _shrunk(width, height, factor, max_pixels)
    return new_width, new_height


def _rounded(length: int, factor: int) -> int:
    return round(length / factor) * factor


def _shrunk(width: int, height: int, factor: int, max_pixels: int) -> tuple[int, int]:
    scale = math.sqrt((height * width) / max_pixels)
    new_width = max(factor, math.floor(width / scale / factor) * factor)
    new_height = max(factor, math.floor(height / scale / factor) * factor)
    if new_width * new_height <= max_pixels:
        return new_width, new_height
    longest = max(factor, max_pixels // factor // factor * factor)
    return (longest, factor) if width > height else (factor, longest)
