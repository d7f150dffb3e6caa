"""What calibration keeps of a group of matrices' inputs: a few matrices, however many tokens there are."""

from dataclasses import dataclass, field

import torch


@dataclass
class InputStatistics:
    """Means over all tokens, float32: `gram` `[in, in]` of x x^T, `magnitudes` `[in]` of |x|.

    Where the float model's inputs x' are known, too: `drift` `[in, in]` of (x' - x) x^T, and for matrices whose
    outputs are added to a residual r `residual_drift` `[out, in]` of (r' - r) x^T.
    """

    gram: torch.Tensor
    magnitudes: torch.Tensor
    drift: torch.Tensor | None = None
    residual_drift: torch.Tensor | None = None
    num_tokens: int = field(default=0)

    @classmethod
    def empty(cls, size: int, device: torch.device) -> "InputStatistics":
        return cls(torch.zeros(size, size, device=device), torch.zeros(size, device=device))

    def add(
        self,
        x: torch.Tensor,
        x_change: torch.Tensor | None = None,
        residual_change: torch.Tensor | None = None,
    ) -> None:
        """x `[..., in]`; changes are the float model's less the quantized one's, the same for all calls or for none."""
        rows = _rows(x)
        kept = self.num_tokens / (self.num_tokens + len(rows))
        self.num_tokens += len(rows)
        share = 1.0 / self.num_tokens
        self.gram.mul_(kept).addmm_(rows.T, rows, alpha=share)
        self.magnitudes.mul_(kept).add_(rows.abs().sum(0), alpha=share)
        if x_change is not None:
            self.drift = _added(self.drift, _rows(x_change), rows, kept, share)
        if residual_change is not None:
            self.residual_drift = _added(self.residual_drift, _rows(residual_change), rows, kept, share)

    def unscaled(self, scales: torch.Tensor) -> "InputStatistics":
        """Of inputs that are divided by `scales` `[in]`."""
        return InputStatistics(
            self.gram / scales / scales[:, None], self.magnitudes / scales, num_tokens=self.num_tokens
        )


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def _added(
    mean: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor, kept: float, share: float
) -> torch.Tensor:
    if mean is None:
        mean = left.new_zeros(left.shape[-1], right.shape[-1])
    return mean.mul_(kept).addmm_(left.T, right, alpha=share)
