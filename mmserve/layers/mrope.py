"""Positions with three axes (time, row, column), as the Qwen-VL models have them (Wang et al. 2024, section 2.1)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mmserve.config import RopeConfig
from mmserve.errors import SetupError
from mmserve.layers.rotary import RotaryTable
from mmserve.request import ImageSpan


class PromptPositions:
    """Positions of one sequence: those of the prompt are laid out once, those of the answer go on by one."""

    def __init__(self, num_prompt_tokens: int, images: Sequence[ImageSpan]) -> None:
        """Text advances all axes by one a token; an image spans its grid, and advances by its longer side."""
        pieces: list[npt.NDArray[np.int64]] = []
        token, position = 0, 0
        for image in images:
            assert image.grid is not None
            pieces.append(_text(position, image.offset - token))
            position += image.offset - token
            pieces.append(_image(position, image.grid))
            position += max(image.grid)
            token = image.end
        pieces.append(_text(position, num_prompt_tokens - token))
        self._prompt = np.concatenate(pieces, axis=1)
        self._delta = position - token

    def slice(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """`[3, stop - start]`, of prompt and answer alike."""
        num_prompt_tokens = self._prompt.shape[1]
        prompt = self._prompt[:, start:stop]
        if stop <= num_prompt_tokens:
            return prompt
        first = max(start, num_prompt_tokens)
        return np.concatenate((prompt, _text(first + self._delta, stop - first)), axis=1)


class MultiAxisRotaryTable:
    """cos and sin where each frequency follows one of the three axes."""

    def __init__(self, table: RotaryTable, scaling: Mapping[str, Any], head_dim: int, device: torch.device) -> None:
        axes = frequency_axes(head_dim // 2, scaling["mrope_section"], interleaved=scaling["mrope_interleaved"])
        self._table = table
        self._axes = torch.tensor(axes * 2, dtype=torch.int64, device=device).view(1, 1, 1, head_dim)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin `[T, 1, D]` at positions `[3, T]`."""
        num_tokens = positions.shape[1]
        index = self._axes.expand(1, num_tokens, 1, -1)
        cos, sin = self._table.at(positions.flatten())
        return tuple(x.view(3, num_tokens, 1, -1).gather(0, index)[0] for x in (cos, sin))  # type: ignore[return-value]


def frequency_axes(num_frequencies: int, sections: Sequence[int], *, interleaved: bool) -> list[int]:
    """The axis of each frequency: in three runs (Qwen2-VL), or alternating while a section lasts (Qwen3-VL).

    Raises `SetupError` where three runs do not make up the frequencies.
    """
    if interleaved:
        return [i % 3 if i < 3 * sections[i % 3] else 0 for i in range(num_frequencies)]
    if sum(sections) != num_frequencies:
        raise SetupError(
            "model_unavailable",
            f"mrope_section {list(sections)} of config.json does not add up to half of the head's size,"
            f" {num_frequencies}",
        )
    return [axis for axis, length in enumerate(sections) for _ in range(length)]


def has_multiple_axes(config: RopeConfig) -> bool:
    return config.scaling is not None and "mrope_section" in config.scaling


def _text(first: int, count: int) -> npt.NDArray[np.int64]:
    return np.broadcast_to(np.arange(first, first + count, dtype=np.int64), (3, count))


def _image(first: int, grid: tuple[int, int]) -> npt.NDArray[np.int64]:
    rows, columns = np.indices(grid, dtype=np.int64).reshape(2, -1)
    return np.stack((np.zeros_like(rows), rows, columns)) + first
