"""Weights that make up for what the layers before have lost, before they are rounded themselves.

GPTQ's target is the weight's own output for the quantized model's inputs x. GPTAQ's (Li et al. 2025, arXiv 2504.02692)
is the output that the float model has, whose inputs x' were others.
"""

import torch

from mmserve.quantizer.statistics import InputStatistics

# Of the diagonal's mean: without it, directions that calibration hardly shows would be corrected by chance.
_RIDGE = 0.01


def corrected(weight: torch.Tensor, known: InputStatistics) -> torch.Tensor:
    """The `[out, in]` next to `weight` whose outputs for x are nearest to what `weight` gives for x'.

    Where the outputs are added to a residual, they also make up for how far that is off. It is the least squares
    solution, so that what is left to rounding is GPTQ's own problem: to stay near it by the gram of x.
    """
    if known.drift is None:
        return weight
    wanted = weight @ known.drift
    if known.residual_drift is not None:
        wanted += known.residual_drift
    damped = known.gram.clone()
    damped.diagonal().add_(_RIDGE * (float(known.gram.diagonal().mean()) or 1.0))
    change: torch.Tensor = torch.linalg.solve(damped, wanted, left=False)
    return weight + change
