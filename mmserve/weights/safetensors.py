"""Reads Hugging Face folders of safetensors files, sharded or not, memory-mapped; a tensor is read when asked for."""

from pathlib import Path
from typing import Any

import safetensors
import torch

from mmserve.errors import SetupError
from mmserve.weights.checkpoint import QuantizedTensor
from mmserve.weights.loader import check_shape, missing_weight
from mmserve.weights.model_files import (
    read_config,
    read_generation_config,
    read_json,
    read_processor_config,
    read_tokenizer,
)
from mmserve.weights.names import to_canonical
from mmserve.weights.tokenizer import Tokenizer

INDEX_NAME = "model.safetensors.index.json"


class SafetensorsCheckpoint:
    """A `Checkpoint` over a folder with `config.json` and `*.safetensors`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.config: dict[str, Any] = read_config(folder)
        self.generation_config: dict[str, Any] = read_generation_config(folder)
        self.processor_config: dict[str, Any] = read_processor_config(folder)
        self._files = {path: _open(path) for path in _weight_files(folder)}
        file_of = {name: path for path, file in self._files.items() for name in file.keys()}  # noqa: SIM118
        names = to_canonical(file_of, self.config.get("model_type", ""))
        self._places = {name: (file_of[stored], stored) for name, stored in names.items()}

    def tokenizer(self) -> Tokenizer:
        return read_tokenizer(self._folder)

    def names(self) -> frozenset[str]:
        return frozenset(self._places)

    def has(self, name: str) -> bool:
        return name in self._places

    def stored_name(self, name: str) -> str:
        return self._places[name][1]

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        if name not in self._places:
            raise missing_weight(name)
        path, stored = self._places[name]
        tensor: torch.Tensor = self._files[path].get_tensor(stored)
        check_shape(name, tuple(tensor.shape), shape or tuple(tensor.shape))
        return tensor

    def quantized(self, name: str) -> QuantizedTensor | None:  # noqa: ARG002
        return None


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX_NAME
    if index.is_file():
        return _indexed_files(index)
    single = folder / "model.safetensors"
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise SetupError("model_unavailable", _why_no_weights(folder))
    return files


def _indexed_files(index: Path) -> list[Path]:
    shards = sorted(set(read_json(index).get("weight_map", {}).values()))
    for shard in shards:
        # An index must not lead out of its folder.
        if Path(shard).name != shard or not (index.parent / shard).is_file():
            raise SetupError("model_unavailable", f"{index.parent} lacks its file {shard}: fetch the model again")
    return [index.parent / shard for shard in shards]


def _why_no_weights(folder: Path) -> str:
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickles:
        return (
            f"{folder} has its weights only as pickle files ({pickles[0]}), which can run code when opened and are "
            "never loaded: convert them to safetensors, or choose a model that has safetensors"
        )
    return f"{folder} has no *.safetensors files: fetch the model again, or use --load-format dummy for random weights"


def _open(path: Path) -> Any:
    try:
        return safetensors.safe_open(str(path), framework="pt", device="cpu")
    except (safetensors.SafetensorError, OSError) as error:
        raise SetupError("model_unavailable", f"{path} cannot be read ({error}): fetch the model again") from None
