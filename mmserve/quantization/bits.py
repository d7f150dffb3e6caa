"""Numbers of a few bits in 32-bit words, the lowest bits first."""

from collections.abc import Sequence

import torch

_WORD = 32
_MASK = (1 << _WORD) - 1


def num_words(count: int, bits: int) -> int:
    """Words that a stream of so many numbers takes."""
    return -(-count * bits // _WORD)


def unpack(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """words int32 `[rows, n]`, a stream of numbers without gaps -> uint8 `[rows, count]`.

    A number of 3 bits may begin in one word and end in the next.
    """
    rows = words.shape[0]
    wide = torch.cat((words, words.new_zeros(rows, 1)), dim=1).to(torch.int64) & _MASK
    places = torch.arange(count, device=words.device) * bits
    index, shift = places // _WORD, places % _WORD
    both = wide[:, index] | (wide[:, index + 1] << _WORD)
    return ((both >> shift) & ((1 << bits) - 1)).to(torch.uint8)


def pack(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `unpack`: `[rows, count]` -> int32 `[rows, ceil(count * bits / 32)]`."""
    rows, count = numbers.shape
    words = torch.zeros(rows, num_words(count, bits) + 1, dtype=torch.int64, device=numbers.device)
    places = torch.arange(count, device=numbers.device) * bits
    shifted = numbers.to(torch.int64) << (places % _WORD)
    index = (places // _WORD).expand(rows, count)
    words.scatter_add_(1, index, shifted & _MASK).scatter_add_(1, index + 1, shifted >> _WORD)
    return torch.where(words > _MASK >> 1, words - (1 << _WORD), words)[:, :-1].to(torch.int32)


def unpack_in_order(words: torch.Tensor, bits: int, order: Sequence[int]) -> torch.Tensor:
    """words int32 `[rows, n]` -> uint8 `[rows, n * len(order)]`; `order` is where in a word each number stands."""
    places = torch.tensor(order, device=words.device) * bits
    numbers = (words[:, :, None] >> places) & ((1 << bits) - 1)
    return numbers.flatten(1).to(torch.uint8)
