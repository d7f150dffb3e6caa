"""Numbers of fewer bits than a byte has room for, several laid over one another."""

import torch

_BYTES_OF_WORD = 8
_WIDTHS = (0, 2, 4, 8)


def lay_over(layers: torch.Tensor, width: int) -> torch.Tensor:
    """uint8 `[n, L, ...]` -> `[n, ...]`: each layer is shifted by `width` bits more than the one before it."""
    held = layers[:, 0].clone()
    for i in range(1, layers.shape[1]):
        held |= layers[:, i] << (i * width)
    return held


def take_apart(held: torch.Tensor, width: int, mask: int, out: torch.Tensor) -> None:
    """The inverse of `lay_over`; of each byte of `out` `[n, L, ...]` the bits of `mask` count."""
    # Eight bytes at a time. Bits that a shift draws in from the sign are masked off.
    layers, words = out.view(torch.int64), held.view(torch.int64)
    for i in range(out.shape[1]):
        torch.bitwise_right_shift(words, i * width, out=layers[:, i])
    layers.bitwise_and_(eight_of(mask))


def eight_of(byte: int) -> int:
    """As a signed number of 64 bits."""
    return int.from_bytes(bytes([byte] * _BYTES_OF_WORD), "little", signed=True)


class SmallNumbers:
    """Whole numbers `[groups, out]` in a range of at most 256, in two, four or eight bits; one alone if they are equal.

    `out` is a multiple of 8.
    """

    def __init__(self, numbers: torch.Tensor) -> None:
        self._num_groups = numbers.shape[0]
        self._lowest = int(numbers.min())
        span = int(numbers.max()) - self._lowest
        self._width = next(width for width in _WIDTHS if span < 1 << width)
        self._held = self._laid_over(numbers) if self._width else None

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """float32 `[groups, stop - start]`, or `[1, 1]` of one alone; `start` and `stop` are multiples of 8."""
        if self._held is None:
            return torch.full((1, 1), float(self._lowest))
        held = self._held[:, :, start:stop]
        if self._width < _WIDTHS[-1]:
            layers = held.new_empty(1, 8 // self._width, *held.shape[1:])
            take_apart(held, self._width, (1 << self._width) - 1, layers)
            held = layers.flatten(0, 1)
        numbers = held.flatten(0, 1)[: self._num_groups].float()
        return numbers.add_(self._lowest) if self._lowest else numbers

    def _laid_over(self, numbers: torch.Tensor) -> torch.Tensor:
        above = (numbers.to(torch.int32) - self._lowest).to(torch.uint8)
        num_layers = 8 // self._width
        padded = above.new_zeros(-(-self._num_groups // num_layers) * num_layers, above.shape[1])
        padded[: self._num_groups] = above
        return lay_over(padded.view(1, num_layers, -1, above.shape[1]), self._width)
