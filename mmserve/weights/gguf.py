"""Reads one GGUF file: tensors under Hugging Face names, dequantised or as packed blocks, from a memory map."""

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmserve.errors import SetupError
from mmserve.weights.checkpoint import QuantizedTensor
from mmserve.weights.gguf_blocks import BLOCK_TYPES, dequantize
from mmserve.weights.gguf_config import to_hf_config
from mmserve.weights.gguf_header import TensorInfo, read_header
from mmserve.weights.gguf_tokenizer import build_tokenizer
from mmserve.weights.loader import check_shape, missing_weight
from mmserve.weights.names import from_gguf
from mmserve.weights.tokenizer import Tokenizer

_PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Follows from the configuration, which `to_hf_config` checks it against.
_DERIVED_TENSORS = frozenset({"rope_freqs.weight"})


class GGUFCheckpoint:
    """A `Checkpoint` over one `.gguf` file. `SetupError` names a tensor type or architecture that is not supported."""

    def __init__(self, path: Path) -> None:
        header = read_header(path)
        self._metadata = header.metadata
        self._check_types(path, header.tensors)
        # Copy-on-write, because torch wants memory that it could write to; nothing is copied until somebody does.
        self._bytes = np.memmap(path, dtype=np.uint8, mode="c")
        by_gguf_name = {info.name: info for info in header.tensors}
        shapes = {name: info.shape for name, info in by_gguf_name.items()}
        derived = {name: self._plain(by_gguf_name[name]) for name in _DERIVED_TENSORS & by_gguf_name.keys()}
        self.config: dict[str, Any] = to_hf_config(header.metadata, shapes, derived.get("rope_freqs.weight"))
        self.config["dtype"] = _dtype_name(header.tensors)
        self.generation_config: dict[str, Any] = {}
        self.processor_config: dict[str, Any] = {}
        self._tensors = {from_gguf(name): info for name, info in by_gguf_name.items() if name not in _DERIVED_TENSORS}

    @staticmethod
    def _check_types(path: Path, tensors: tuple[TensorInfo, ...]) -> None:
        for info in tensors:
            if info.type not in _PLAIN_TYPES and info.type not in BLOCK_TYPES:
                supported = ", ".join([*_PLAIN_TYPES, *BLOCK_TYPES])
                raise SetupError(
                    "model_unavailable",
                    f"{path.name} stores {info.name} as {info.type}, which is not supported: take one of {supported}",
                )

    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return build_tokenizer(self._metadata)

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def has(self, name: str) -> bool:
        return name in self._tensors

    def stored_name(self, name: str) -> str:
        return name

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        info = self._tensors.get(name)
        if info is None:
            raise missing_weight(name)
        check_shape(name, info.shape, shape or info.shape)
        if info.type in _PLAIN_TYPES:
            plain = self._restore_order(name, self._plain(info))
            # A small view would keep the whole file mapped when everything else has been converted and let go.
            return plain if plain.ndim > 1 else plain.clone()
        # Rows are put in order while they are still packed: there are fewer bytes to move.
        blocks = self._restore_order(name, self._blocks(info))
        return dequantize(blocks, info.type).reshape(info.shape)

    def quantized(self, name: str) -> QuantizedTensor | None:
        info = self._tensors.get(name)
        if info is None:
            raise missing_weight(name)
        if info.type in _PLAIN_TYPES or len(info.shape) != 2:
            return None
        rows, columns = info.shape
        return QuantizedTensor(self._restore_order(name, self._blocks(info)), info.type, (rows, columns))

    def _plain(self, info: TensorInfo) -> torch.Tensor:
        return self._raw(info).view(_PLAIN_TYPES[info.type]).reshape(info.shape)

    def _blocks(self, info: TensorInfo) -> torch.Tensor:
        num_rows = 1
        for size in info.shape[:-1]:
            num_rows *= size
        return self._raw(info).reshape(num_rows, -1)

    def _raw(self, info: TensorInfo) -> torch.Tensor:
        return torch.from_numpy(self._bytes[info.offset : info.offset + info.num_bytes])

    def _restore_order(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Undo the interleaving of rotary halves that GGUF files of the llama architecture have in q and k."""
        if self.config["model_type"] != "llama" or not name.endswith(_ROTARY_SUFFIXES):
            return rows
        num_heads = self.config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
        return pairs.transpose(1, 2).reshape(rows.shape)


_ROTARY_SUFFIXES = ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")


def _dtype_name(tensors: tuple[TensorInfo, ...]) -> str:
    """The dtype of the matrices where all are plain, else float32, which is what dequantising gives."""
    types = {info.type for info in tensors if len(info.shape) > 1}
    plain = _PLAIN_TYPES[types.pop()] if len(types) == 1 and types <= _PLAIN_TYPES.keys() else torch.float32
    return str(plain).removeprefix("torch.")
