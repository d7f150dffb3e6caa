"""Four-bit numbers in the layout of PyTorch's packed product on a CPU.

It has them in blocks of 64 rows, and of each pair (`nibble_pairs`) the first nibbles of a group in a row, and after
them the second ones. Where fewer bits of them count, they are held in so many.
"""

from typing import Protocol

import torch

from mmserve.quantization.laid_over import eight_of, lay_over, take_apart

_BLOCK = 64
# By how many bits count: of which widths they are held, and where in a nibble these begin.
_PLANES = {1: ((1, 0),), 2: ((2, 0),), 3: ((2, 0), (1, 2))}
# Both nibbles of a byte, by width.
_MASKS = {1: 0x11, 2: 0x33}
# Second nibbles count from here, as the product does.
_MIDDLES = 0x88


class PackedNibbles(Protocol):
    """`[out, bytes]`."""

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Whole blocks of 64 rows, or the smaller one at the end."""


class PlainNibbles:
    def __init__(self, packed: torch.Tensor) -> None:
        self._packed = packed

    def rows(self, start: int, stop: int) -> torch.Tensor:
        return self._packed[start:stop]


class LayeredNibbles:
    """Of `packed` `[out, bytes]`, numbers of two or three bits, or pairs for numbers of five to seven.

    `group_size` is that of the numbers that are in pairs. Only some bits of the second of a pair count, too.
    """

    def __init__(self, packed: torch.Tensor, bits: int, group_size: int) -> None:
        self._is_paired = bits > 4
        self._planes = _PLANES[bits % 4]
        self._width = packed.shape[1]
        self._lows_of_row = self._width // 2 if self._is_paired else self._width
        self._part_of_row = group_size // 2 if self._is_paired else self._width
        blocks = [self._parts(packed[start:stop]) for start, stop in pieces_of(len(packed), len(packed))]
        self._highs = torch.cat([parts[:, 0].flatten() for parts in blocks]) if self._is_paired else None
        self._lows = [
            torch.cat([_laid_over(parts[:, -1], width, shift) for parts in blocks]) for width, shift in self._planes
        ]

    @staticmethod
    def takes(bits: int) -> bool:
        return bits % 4 != 0

    def rows(self, start: int, stop: int) -> torch.Tensor:
        first, last = start * self._lows_of_row, stop * self._lows_of_row
        out = torch.empty(stop - start, self._width, dtype=torch.uint8)
        parts = self._parts(out)
        if self._highs is not None:
            parts[:, 0] = self._highs[first:last].view(len(parts), -1)
        for (width, shift), held in zip(self._planes, self._lows, strict=True):
            num_layers = 4 // width
            lows = (out.new_empty(last - first) if shift else parts[:, -1]).view(len(parts), num_layers, -1)
            plane = held[first // num_layers : last // num_layers].view(len(parts), -1)
            take_apart(plane, width, _MASKS[width], lows)
            if shift:
                _words(parts[:, -1]).bitwise_or_(_words(lows.flatten(1)).bitwise_left_shift_(shift))
        if self._is_paired:
            _words(parts[:, 1]).bitwise_or_(eight_of(_MIDDLES))
        return out

    def _parts(self, rows: torch.Tensor) -> torch.Tensor:
        """Of rows whose blocks are of one size: bytes `[groups, 2, size]` of pairs, `[blocks, 1, size]` of others."""
        return rows.view(-1).view(-1, 2 if self._is_paired else 1, self._part_of_row * min(_BLOCK, len(rows)))


def _laid_over(lows: torch.Tensor, width: int, shift: int) -> torch.Tensor:
    plane = (lows >> shift) & _MASKS[width]
    return lay_over(plane.view(len(plane), 4 // width, -1), width).flatten()


def _words(of_bytes: torch.Tensor) -> torch.Tensor:
    return of_bytes.view(torch.int64)


def pieces_of(num_rows: int, size: int) -> list[tuple[int, int]]:
    """Pieces of `size` rows, in whole blocks, and the smaller block that may be left."""
    whole = num_rows // _BLOCK * _BLOCK
    pieces = [(start, min(start + size, whole)) for start in range(0, whole, size)]
    return pieces if whole == num_rows else [*pieces, (whole, num_rows)]
