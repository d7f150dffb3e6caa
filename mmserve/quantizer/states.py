"""Files of a run: safetensors, and the calibration samples' hidden states between two layers.

These are in files so that memory does not grow with the samples.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file


class HiddenStates:
    """float32 `[N, S, hidden]` in a file that is mapped into memory."""

    def __init__(self, path: Path, shape: tuple[int, int, int]) -> None:
        """A file that is there already has to have that size. Raises `OSError`."""
        self.path = path
        size = shape[0] * shape[1] * shape[2]
        _reserve(path, size * torch.float32.itemsize)
        self.tensor = torch.from_file(str(path), shared=True, size=size, dtype=torch.float32).view(shape)

    def remove(self) -> None:
        """What is mapped stays readable until it is let go."""
        self.path.unlink(missing_ok=True)


def _reserve(path: Path, num_bytes: int) -> None:
    """Without room on the disk, writing to what is mapped would end the process."""
    with path.open("ab") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        except OSError as error:
            raise OSError(error.errno, error.strerror, os.fspath(path)) from None


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """A safetensors file. Raises `OSError`."""
    try:
        save_file(dict(tensors), path, None if metadata is None else dict(metadata))
    except SafetensorError as error:
        raise OSError(f"cannot write {path}: {error}") from None
