"""What calibration keeps of a layer's inputs: enough for AWQ and GPTQ, and no more than a matrix each."""

from dataclasses import dataclass, field

import torch


@dataclass
class InputStatistics:
    """Means over all tokens, float32: `gram` `[in, in]` of x x^T, `magnitudes` `[in]` of |x|."""

    gram: torch.Tensor
    magnitudes: torch.Tensor
    num_tokens: int = field(default=0)

    @classmethod
    def empty(cls, size: int, device: torch.device) -> "InputStatistics":
        return cls(torch.zeros(size, size, device=device), torch.zeros(size, device=device))

    def add(self, x: torch.Tensor) -> None:
        """x `[..., in]`."""
        rows = x.reshape(-1, x.shape[-1])
        kept = self.num_tokens / (self.num_tokens + len(rows))
        self.num_tokens += len(rows)
        self.gram.mul_(kept).addmm_(rows.T, rows, alpha=1.0 / self.num_tokens)
        self.magnitudes.mul_(kept).add_(rows.abs().sum(0), alpha=1.0 / self.num_tokens)

    def unscaled(self, scales: torch.Tensor) -> "InputStatistics":
        """Of inputs that are divided by `scales` `[in]`."""
        return InputStatistics(self.gram / scales / scales[:, None], self.magnitudes / scales, self.num_tokens)
