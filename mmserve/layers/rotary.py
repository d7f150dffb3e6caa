"""Rotary position embedding (Su et al. 2021) with the scalings that checkpoints use."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from mmserve.config import RopeConfig
from mmserve.errors import SetupError


class RotaryTable:
    """cos and sin of every position up to `max_positions`, computed once, gathered once a step."""

    def __init__(
        self, config: RopeConfig, *, head_dim: int, max_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        frequencies, magnitude = inverse_frequencies(config, head_dim)
        angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies
        cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
        self._cos = torch.cat((cos, cos), dim=-1)[:, None].to(device, dtype)
        self._sin = torch.cat((-sin, sin), dim=-1)[:, None].to(device, dtype)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin `[T, 1, D]` at positions `[T]`, as `apply_rotary` takes them."""
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)


def inverse_frequencies(config: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Angular frequencies `[head_dim / 2]` in float32 and the factor on cos and sin (1 except for YaRN).

    Raises `SetupError` for a scaling that is not known, or lacks a parameter.
    """
    try:
        return _inverse_frequencies(config, head_dim)
    except KeyError as error:
        raise SetupError("model_unavailable", f"the rope scaling in config.json has no {error.args[0]!r}") from None


def _inverse_frequencies(config: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies: torch.Tensor = 1.0 / config.theta**exponents
    scaling = config.scaling
    if scaling is None:
        return frequencies, 1.0
    kind = scaling["rope_type"]
    if kind == "default":
        return frequencies, 1.0
    if kind == "linear":
        return frequencies / float(scaling["factor"]), 1.0
    if kind == "llama3":
        return _llama3(frequencies, scaling), 1.0
    if kind == "yarn":
        return _yarn(frequencies, scaling, config.theta, head_dim)
    raise SetupError(
        "model_unavailable", f"rope scaling {kind!r} is not supported: use default, linear, llama3 or yarn"
    )


def _llama3(frequencies: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Long waves are slowed by `factor`, short ones kept, those between blended (Llama 3.1)."""
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    blended: torch.Tensor = frequencies * (kept + (1.0 - kept) / float(scaling["factor"]))
    return blended


def _yarn(
    frequencies: torch.Tensor, scaling: Mapping[str, Any], theta: float, head_dim: int
) -> tuple[torch.Tensor, float]:
    """Blend by the number of turns over the original context (Peng et al. 2023, section 3.2 and 3.4)."""
    factor, original = float(scaling["factor"]), float(scaling["original_max_position_embeddings"])

    def dimension(num_turns: float) -> float:
        return head_dim * math.log(original / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension(scaling.get("beta_fast") or 32.0), dimension(scaling.get("beta_slow") or 1.0)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    indices = torch.arange(head_dim // 2, dtype=torch.float32)
    slowed = ((indices - first) / max(last - first, 0.001)).clamp(0.0, 1.0)
    return frequencies * (1.0 - slowed + slowed / factor), _yarn_magnitude(factor, scaling)


def _yarn_magnitude(factor: float, scaling: Mapping[str, Any]) -> float:
    """As the checkpoint says, else `0.1 ln(factor) + 1`; `mscale` and `mscale_all_dim` are DeepSeek's refinement."""

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return magnitude(scaling["mscale"]) / magnitude(scaling["mscale_all_dim"])
    return magnitude(1.0)
