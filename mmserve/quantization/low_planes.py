"""Pairs of nibbles (`nibble_pairs`) of whose second one or two bits count, held in so many bits.

PyTorch's packed layout has a group's first nibbles in a row, and after them its second ones. Four seconds of one bit,
or two of two bits, are laid over one another here; taken apart, they are as many bytes at once as a register holds.
"""

from typing import Protocol

import torch

# Seconds count from here, as the product does.
_MIDDLES = 0x88
_MASKS = {1: 0x11, 2: 0x33}
LAYERED_BITS = frozenset(_MASKS)
_BLOCK = 64


class PackedNibbles(Protocol):
    """Four-bit numbers in the layout of PyTorch's packed product, `[out, bytes]`."""

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Whole blocks of 64 rows, or the smaller one at the end."""


class PlainNibbles:
    def __init__(self, packed: torch.Tensor) -> None:
        self._packed = packed

    def rows(self, start: int, stop: int) -> torch.Tensor:
        return self._packed[start:stop]


class LayeredPairs:
    """Of `packed` `[out, bytes]`, pairs of numbers of `low_bits` more than four bits in groups of `group_size`."""

    def __init__(self, packed: torch.Tensor, group_size: int, low_bits: int) -> None:
        self._group_size = group_size
        self._low_bits = low_bits
        self._num_layers = 4 // low_bits
        self._width = packed.shape[1]
        parts = [self._split(packed[start:stop]) for start, stop in pieces_of(packed.shape[0], packed.shape[0])]
        self._highs, self._lows = (torch.cat(part) for part in zip(*parts, strict=True))

    def rows(self, start: int, stop: int) -> torch.Tensor:
        half = self._width // 2
        size = self._part_size(stop - start)
        highs = self._highs[start * half : stop * half].view(-1, size)
        lows = self._lows[start * half // self._num_layers : stop * half // self._num_layers]
        out = highs.new_empty(len(highs), 2, size)
        out[:, 0] = highs
        # Eight bytes at a time. Bits that a shift draws in from the sign are masked off.
        seconds = out[:, 1].view(len(highs), self._num_layers, -1).view(torch.int64)
        layers = lows.view(len(highs), -1).view(torch.int64)
        for layer in range(self._num_layers):
            torch.bitwise_right_shift(layers, layer * self._low_bits, out=seconds[:, layer])
        seconds.bitwise_and_(_eight_of(_MASKS[self._low_bits])).bitwise_or_(_eight_of(_MIDDLES))
        return out.view(stop - start, self._width)

    def _split(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of rows whose blocks are of one size: bytes of highs, and those of layered lows."""
        pairs = packed.reshape(-1).view(-1, 2, self._part_size(len(packed)))
        layers = (pairs[:, 1] & _MASKS[self._low_bits]).view(len(pairs), self._num_layers, -1)
        lows = torch.zeros_like(layers[:, 0])
        for layer in range(self._num_layers):
            lows |= layers[:, layer] << (layer * self._low_bits)
        return pairs[:, 0].reshape(-1), lows.reshape(-1)

    def _part_size(self, num_rows: int) -> int:
        """Bytes of the first, or the second, nibbles of a group in a block of rows."""
        return self._group_size * min(_BLOCK, num_rows) // 2


def pieces_of(num_rows: int, size: int) -> list[tuple[int, int]]:
    """Pieces of `size` rows, in whole blocks, and the smaller block that may be left."""
    whole = num_rows // _BLOCK * _BLOCK
    pieces = [(start, min(start + size, whole)) for start in range(0, whole, size)]
    return pieces if whole == num_rows else [*pieces, (whole, num_rows)]


def _eight_of(byte: int) -> int:
    """As a signed number of 64 bits."""
    return int.from_bytes(bytes([byte] * 8), "little", signed=True)
