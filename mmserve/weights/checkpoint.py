"""What a model is loaded from: one interface over safetensors folders, GGUF files and random weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from mmserve.config import LoadFormat, QuantizationName
from mmserve.errors import SetupError
from mmserve.weights import hub
from mmserve.weights.shapes import find_shape, is_shape
from mmserve.weights.tokenizer import Tokenizer


@dataclass(frozen=True)
class QuantizedTensor:
    """A matrix as GGUF blocks: `data` uint8 [rows, bytes of a row], `type` ggml's name, `shape` (rows, columns)."""

    data: torch.Tensor
    type: str
    shape: tuple[int, int]


class Checkpoint(Protocol):
    """Configuration, tokenizer and tensors of a model, under Hugging Face names whatever the file format."""

    @property
    def config(self) -> dict[str, Any]:
        """The shape of Hugging Face's `config.json`."""

    @property
    def generation_config(self) -> dict[str, Any]: ...

    @property
    def processor_config(self) -> dict[str, Any]:
        """The shape of Hugging Face's `preprocessor_config.json`; empty where there is none."""

    def tokenizer(self) -> Tokenizer: ...

    def names(self) -> frozenset[str]:
        """Hugging Face parameter names; empty where tensors are made up on demand."""

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""

    def stored_name(self, name: str) -> str:
        """What the file itself calls a tensor, where that is a Hugging Face name of some kind, else `name`."""

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """In the file's own dtype (float32 where it was quantised). `SetupError` if absent or not of `shape`."""

    def quantized(self, name: str) -> QuantizedTensor | None:
        """The tensor's packed blocks; None where it is not quantised."""


def open_checkpoint(
    model: str,
    *,
    load_format: LoadFormat = "auto",
    quantization: QuantizationName = "auto",
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Checkpoint:
    """Find `model` (built-in name, folder, file, hub id, shape) and open it.

    `seed` and `device` are for dummy weights, and so is `quantization`: other weights are as they are stored.

    Raises `SetupError` (`model_unavailable`) that says what to do.
    """
    if is_shape(model):
        return _open_shape(model, load_format, quantization, seed, device)
    if load_format == "dummy":
        return _open_dummy(hub.resolve(model, with_weights=False), quantization, seed, device)
    path = hub.resolve(model)
    found: LoadFormat = "gguf" if path.is_file() else "safetensors"
    if load_format not in ("auto", found):
        raise SetupError("model_unavailable", f"{model} is {found}, not {load_format}: use --load-format auto")
    return _open_files(path)


def _open_files(path: Path) -> Checkpoint:
    # Readers are imported where they are used: a GGUF start should not pay for safetensors, nor the reverse.
    if path.is_file():
        from mmserve.weights.gguf import GGUFCheckpoint

        return GGUFCheckpoint(path)
    from mmserve.weights.safetensors import SafetensorsCheckpoint

    return SafetensorsCheckpoint(path)


def _open_shape(
    model: str, load_format: LoadFormat, quantization: QuantizationName, seed: int, device: torch.device | str
) -> Checkpoint:
    shape = find_shape(model)
    if load_format != "dummy":
        raise SetupError("model_unavailable", f"{model} has no weights: add --load-format dummy to make them up")
    from mmserve.weights.dummy import DummyCheckpoint, shape_tokenizer, stored_as

    return DummyCheckpoint(
        {**shape.config, **stored_as(quantization)},
        {},
        lambda: shape_tokenizer(shape),
        dict(shape.processor_config),
        seed=seed,
        device=device,
    )


def _open_dummy(path: Path, quantization: QuantizationName, seed: int, device: torch.device | str) -> Checkpoint:
    from mmserve.weights.dummy import DummyCheckpoint, byte_level_tokenizer, stored_as
    from mmserve.weights.model_files import (
        has_tokenizer,
        read_config,
        read_generation_config,
        read_processor_config,
        read_tokenizer,
    )

    if path.is_file():
        source = _open_files(path)
        config = {**source.config, **stored_as(quantization)}
        return DummyCheckpoint(config, source.generation_config, source.tokenizer, seed=seed, device=device)
    return DummyCheckpoint(
        {**read_config(path), **stored_as(quantization)},
        read_generation_config(path),
        (lambda: read_tokenizer(path)) if has_tokenizer(path) else byte_level_tokenizer,
        read_processor_config(path),
        seed=seed,
        device=device,
    )
