"""Matrices as AWQ, GPTQ and compressed-tensors store them, packed here number by number, as their formats say."""

from dataclasses import dataclass, field

import numpy as np
import torch
from compressed_tensors.compressors import pack_to_int32

# AutoAWQ's order: nibble i of a word holds this one of its eight columns.
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass
class StoredMatrices:
    """Tensors by name, as `TensorSource` gives them."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)

    def has(self, name: str) -> bool:
        return name in self.tensors

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self.take_any(name)
        assert tuple(tensor.shape) == shape, name
        return tensor

    def take_any(self, name: str) -> torch.Tensor:
        self.taken.add(name)
        return self.tensors[name]

    def ignore(self, name: str) -> None:
        self.taken.add(name)


def random_parts(
    seed: int, out_features: int, in_features: int, bits: int, group_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers `[out, in]`, scales float16 and zero points `[out, groups]`."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 1 << bits, (out_features, in_features), generator=generator)
    num_groups = in_features // group_size
    scales = (torch.rand(out_features, num_groups, generator=generator) * 0.05 + 0.01).half()
    zeros = torch.randint(1, 1 << bits, (out_features, num_groups), generator=generator)
    return numbers, scales, zeros


def value(numbers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """float64 `[out, in]`, by the formula alone; `groups` `[in]` is each column's group."""
    return (numbers.double() - zeros.double()[:, groups]) * scales.double()[:, groups]


def awq_words(columns: torch.Tensor) -> torch.Tensor:
    """`[rows, out]` -> int32 `[rows, out / 8]`."""
    rows, count = columns.shape
    words = np.zeros((rows, count // 8), dtype=np.uint32)
    for word in range(count // 8):
        for nibble, column in enumerate(_AWQ_COLUMNS):
            words[:, word] |= columns[:, word * 8 + column].numpy().astype(np.uint32) << np.uint32(4 * nibble)
    return torch.from_numpy(words.view(np.int32))


def gptq_words(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """`[count, columns]` -> int32 `[count * bits / 32, columns]`, a stream of bits down each column."""
    count, columns = rows.shape
    stream = np.zeros((count * bits, columns), dtype=np.uint8)
    for bit in range(bits):
        stream[bit::bits] = (rows.numpy() >> bit) & 1
    packed = np.packbits(stream, axis=0, bitorder="little").reshape(-1, 4, columns)
    words = np.ascontiguousarray(packed.transpose(0, 2, 1)).view("<i4")[..., 0]
    return torch.from_numpy(words.copy())


def compressed_words(numbers: torch.Tensor, bits: int, dim: int = 1) -> torch.Tensor:
    """By the format's own library, which packs signed numbers."""
    words: torch.Tensor = pack_to_int32((numbers - (1 << (bits - 1))).to(torch.int8), bits, packed_dim=dim)
    return words
