"""The header of a GGUF file: metadata and the table of tensors (the format's specification, versions 2 and 3).

The `gguf` package's own reader makes several arrays of each string: 2.0 s for a vocabulary of 49,152 with as many
merges on the CPU where this takes 0.1 s. Types and block sizes are the package's.
"""

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from mmserve.errors import SetupError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_SCALARS: dict[int, str] = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: row-major `shape` (the file has the fastest dimension first), `offset` within the file."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class GGUFHeader:
    metadata: dict[str, Any]
    tensors: tuple[TensorInfo, ...]


def read_header(path: Path) -> GGUFHeader:
    """Parse the header. `SetupError` for a file that is not GGUF, cut short, or of a tensor type unknown to `gguf`."""
    with path.open("rb") as file:
        if file.read(4) != _MAGIC:
            raise SetupError("model_unavailable", f"{path} is not a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _parse(data)
            except (struct.error, UnicodeDecodeError, ValueError, OverflowError, MemoryError) as error:
                raise SetupError(
                    "model_unavailable", f"{path} is damaged or cut short ({error}): fetch it again"
                ) from None


def _parse(data: mmap.mmap) -> GGUFHeader:
    cursor = _Cursor(data, len(_MAGIC))
    version = cursor.scalar("I")
    if version not in _VERSIONS:
        raise ValueError(f"GGUF version {version}, only little-endian 2 and 3 are read")
    num_tensors, num_fields = cursor.scalar("Q"), cursor.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_fields):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    rows = [cursor.tensor_row() for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"alignment {alignment!r}")
    start = -(-cursor.position // alignment) * alignment
    tensors = tuple(_tensor_info(row, start, len(data)) for row in rows)
    return GGUFHeader(metadata, tensors)


def _tensor_info(row: tuple[str, tuple[int, ...], int, int], start: int, file_size: int) -> TensorInfo:
    name, shape, type_id, offset = row
    kind = GGMLQuantizationType(type_id)
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    num_elements = 1
    for size in shape:
        num_elements *= size
    if shape and shape[-1] % block_size:
        raise ValueError(f"rows of {name} are not whole {kind.name} blocks")
    num_bytes = num_elements // block_size * block_bytes
    if start + offset + num_bytes > file_size:
        raise ValueError(f"{name} reaches beyond the end")
    return TensorInfo(name, kind.name, shape, start + offset, num_bytes)


class _Cursor:
    """Reads values one after another."""

    def __init__(self, data: mmap.mmap, position: int) -> None:
        self._data = data
        self.position = position

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._data, self.position)
        self.position += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        return self._strings(1)[0]

    def value(self, type_id: int) -> Any:
        if type_id == GGUFValueType.STRING:
            return self.string()
        if type_id == GGUFValueType.ARRAY:
            return self._array()
        return self.scalar(_code(type_id))

    def tensor_row(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        dimensions = self._numbers("Q", self.scalar("I"))
        return name, tuple(reversed(dimensions)), self.scalar("I"), self.scalar("Q")

    def _array(self) -> list[Any]:
        type_id, count = self.scalar("I"), self.scalar("Q")
        return self._strings(count) if type_id == GGUFValueType.STRING else self._numbers(_code(type_id), count)

    def _numbers(self, code: str, count: int) -> list[Any]:
        if count * struct.calcsize("<" + code) > len(self._data) - self.position:
            raise ValueError("an array reaches beyond the end")
        layout = f"<{count}{code}"
        values = struct.unpack_from(layout, self._data, self.position)
        self.position += struct.calcsize(layout)
        return list(values)

    def _strings(self, count: int) -> list[str]:
        # The hot loop of the header: locals instead of attributes.
        data, position = self._data, self.position
        read_length: Callable[..., tuple[int]] = struct.Struct("<Q").unpack_from
        found: list[str] = []
        for _ in range(count):
            (length,) = read_length(data, position)
            position += 8 + length
            if position > len(data):
                raise ValueError("a string reaches beyond the end")
            found.append(data[position - length : position].decode("utf-8"))
        self.position = position
        return found


def _code(type_id: int) -> str:
    if type_id not in _SCALARS:
        raise ValueError(f"metadata of type {type_id}")
    return _SCALARS[type_id]
