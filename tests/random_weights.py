"""Random weights that make large models neither blind to their pictures nor chaotic."""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Gains:
    """How wide weights are drawn.

    A matrix of n columns has the standard deviation `matrix / sqrt(n)`. Scores of attention have about `scores` in the
    decoder and `vision_scores` in the encoder: with much less, attention is an average over all tokens, in which
    neither a picture nor its place is seen; with much more, rounding grows from layer to layer.
    """

    scores: float
    vision_scores: float
    matrix: float = 1.0
    embedding: float = 0.5
    norm: float = 0.05
    bias: float = 0.02


@torch.no_grad()
def randomize(model: Any, gains: Gains, seed: int) -> None:
    """Draw every parameter of transformers' `model` anew, on its device."""
    parameters = sorted(model.named_parameters())
    generator = torch.Generator(parameters[0][1].device).manual_seed(seed)
    for name, parameter in parameters:
        mean, std = _mean_and_std(name, parameter, gains)
        parameter.normal_(mean, std, generator=generator)
        if name.endswith("attn.qkv.weight"):
            parameter[: parameter.shape[0] // 3 * 2] *= gains.vision_scores**0.5


def _mean_and_std(name: str, parameter: torch.Tensor, gains: Gains) -> tuple[float, float]:
    scores = gains.vision_scores if "visual." in name or "vision_tower." in name else gains.scores
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return scores**0.5, gains.norm
    if parameter.ndim == 1:
        return (1.0, gains.norm) if name.endswith(".weight") else (0.0, gains.bias)
    if parameter.ndim == 2 and "embed" in name:
        return 0.0, gains.embedding
    gain = gains.matrix * (scores**0.5 if "q_proj" in name or "k_proj" in name else 1.0)
    return 0.0, gain / parameter[0].numel() ** 0.5
