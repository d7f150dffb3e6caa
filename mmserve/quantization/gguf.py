"""GGUF's blocks as grouped numbers.

Format: llama.cpp's `ggml-common.h`. Blocks of 32 columns: Q4_0 `d * (q - 8)`, Q5_0 `d * (q - 16)`, Q8_0 `d * q`, Q4_1
and Q5_1 `d * q + m`. Blocks of 256: Q4_K and Q5_K `d * sc * q - dmin * m` with `sc` and `m` of 6 bits for each 32
columns, Q6_K `d * sc * (q - 32)` with `sc` of 8 bits for each 16.
"""

from collections.abc import Callable, Mapping

import torch

from mmserve.quantization.grouped_ints import FactorParts, GroupedInts

_SUPER_BLOCK = 256
_GROUP = 32
_Q6_GROUP = 16


def is_grouped(kind: str) -> bool:
    """Whether `grouped_ints` takes blocks of this kind."""
    return kind in _UNPACKERS


def grouped_ints(data: torch.Tensor, kind: str) -> GroupedInts:
    """data uint8 `[out, bytes of a row]` in blocks of `kind`."""
    return _UNPACKERS[kind](data)


def _q4(data: torch.Tensor, *, has_minimum: bool) -> GroupedInts:
    factors, blocks = _header(data, 4 if has_minimum else 2, 16)
    return _of_32(_nibbles(blocks), factors, 4)


def _q5(data: torch.Tensor, *, has_minimum: bool) -> GroupedInts:
    factors, blocks = _header(data, 4 if has_minimum else 2, 20)
    fifth = blocks[:, :, :4, None] >> torch.arange(8, dtype=torch.uint8, device=data.device) & 1
    return _of_32(_nibbles(blocks[:, :, 4:]) | fifth.flatten(2) << 4, factors, 5)


def _q8_0(data: torch.Tensor) -> GroupedInts:
    factors, blocks = _header(data, 2, 32)
    return _of_32(blocks ^ 0x80, factors, 8)


def _of_32(numbers: torch.Tensor, factors: torch.Tensor, bits: int) -> GroupedInts:
    """Without a minimum numbers are counted from the middle of their range."""
    numbers, scales = numbers.flatten(1), factors[:, :, 0]
    if factors.shape[2] == 2:
        return GroupedInts(numbers, scales.float(), factors[:, :, 1].float(), bits=bits, group_size=_GROUP)
    zeros = torch.full_like(scales, 1 << (bits - 1))
    return GroupedInts.with_zeros(numbers, scales, zeros, bits=bits, group_size=_GROUP)


def _q4_k(data: torch.Tensor) -> GroupedInts:
    factors, blocks = _header(data, 4, 140)
    return _of_super_blocks(_nibbles(_lines(blocks[:, :, 12:], 32)), factors, blocks[:, :, :12], 4)


def _q5_k(data: torch.Tensor) -> GroupedInts:
    factors, blocks = _header(data, 4, 172)
    shifts = torch.arange(8, dtype=torch.uint8, device=data.device)[:, None]
    fifth = (blocks[:, :, 12:44][:, :, None] >> shifts & 1).flatten(2)
    low = _nibbles(_lines(blocks[:, :, 44:], 32)).flatten(2)
    return _of_super_blocks(low | fifth << 4, factors, blocks[:, :, :12], 5)


def _of_super_blocks(numbers: torch.Tensor, factors: torch.Tensor, packed: torch.Tensor, bits: int) -> GroupedInts:
    """`packed` has eight scales and eight minima of 6 bits in twelve bytes; the last four of each are in two pieces."""
    first, second, third = packed[:, :, :4], packed[:, :, 4:8], packed[:, :, 8:]
    scales = torch.cat((first & 0x3F, (third & 0xF) | (first >> 2 & 0x30)), dim=-1)
    minima = torch.cat((second & 0x3F, (third >> 4) | (second >> 2 & 0x30)), dim=-1)
    parts = FactorParts(factors[:, :, 0], scales.flatten(1), -factors[:, :, 1], minima.flatten(1))
    return GroupedInts.of_parts(numbers.flatten(1), parts, bits=bits, group_size=_GROUP)


def _q6_k(data: torch.Tensor) -> GroupedInts:
    blocks = data.view(data.shape[0], -1, _SUPER_BLOCK * 6 // 8 + 18)
    low = _nibbles(_lines(blocks[:, :, :128], 64)).flatten(2)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=data.device)[:, None]
    high = (_lines(blocks[:, :, 128:192], 32)[:, :, :, None] >> shifts & 3).flatten(2)
    steps = blocks[:, :, 192:208].contiguous().view(torch.int8).flatten(1)
    factors = blocks[:, :, 208:].contiguous().view(torch.float16).flatten(1)
    parts = FactorParts(factors, steps, None, torch.full_like(steps, -32))
    return GroupedInts.of_parts((low | high << 4).flatten(1), parts, bits=6, group_size=_Q6_GROUP)


def _header(data: torch.Tensor, num_bytes: int, rest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks that begin with float16 factors -> those `[out, blocks, factors]`, and `rest` bytes a block."""
    blocks = data.view(data.shape[0], -1, num_bytes + rest)
    return blocks[:, :, :num_bytes].contiguous().view(torch.float16), blocks[:, :, num_bytes:]


def _lines(packed: torch.Tensor, size: int) -> torch.Tensor:
    return packed.reshape(*packed.shape[:2], -1, size)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The low halves of the bytes of the last axis, and after them the high ones."""
    return torch.cat((packed & 0xF, packed >> 4), dim=-1)


_UNPACKERS: Mapping[str, Callable[[torch.Tensor], GroupedInts]] = {
    "Q4_0": lambda data: _q4(data, has_minimum=False),
    "Q4_1": lambda data: _q4(data, has_minimum=True),
    "Q5_0": lambda data: _q5(data, has_minimum=False),
    "Q5_1": lambda data: _q5(data, has_minimum=True),
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
