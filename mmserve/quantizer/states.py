"""The calibration samples' hidden states between two layers: a file, so that memory does not grow with the samples."""

from pathlib import Path

import torch


class HiddenStates:
    """float32 `[N, S, hidden]` in a file that is mapped into memory."""

    def __init__(self, path: Path, shape: tuple[int, int, int]) -> None:
        self.path = path
        size = shape[0] * shape[1] * shape[2]
        self.tensor = torch.from_file(str(path), shared=True, size=size, dtype=torch.float32).view(shape)

    def remove(self) -> None:
        """What is mapped stays readable until it is let go."""
        self.path.unlink(missing_ok=True)
