"""The kernels of quantized products in plain PyTorch: twins of the same signatures."""

import torch

_LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
_SMALLEST_SCALE = 1e-12
_TILE_COLUMNS, _MIDDLE = 128, 8
_BLOCK_COLUMNS = 128


def quantize_rows(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x `[M, K]` -> FP8 (E4M3) or int8 `[M, K]` and float32 scales `[M, 1]`."""
    scales = (x.float().abs().amax(dim=-1, keepdim=True) / _LARGEST[dtype]).clamp(min=_SMALLEST_SCALE)
    numbers = x.float() / scales
    return (numbers if dtype.is_floating_point else numbers.round()).to(dtype), scales


def dequantize_int4(
    words: torch.Tensor, factors: torch.Tensor, group_size: int, num_columns: int, dtype: torch.dtype
) -> torch.Tensor:
    """The matrix `[N, K]`, rounded to `dtype`, which is that of the factors; see `int4_matmul`."""
    columns = torch.arange(num_columns, device=words.device)
    in_tile = columns % _TILE_COLUMNS
    word, nibble = _bits(in_tile, (2, 1, 6, 5)), _bits(in_tile, (0, 4, 3))
    numbers = ((words[columns // _TILE_COLUMNS, :, word] >> (4 * nibble)[:, None]) & 0xF).T - _MIDDLE
    span = max(_TILE_COLUMNS, group_size)
    chosen = factors[columns // span, :, columns % span // group_size].T
    weight = numbers.float() * chosen.to(torch.int16).view(dtype).float()
    if factors.dtype is torch.int32:
        weight += (chosen >> 16).to(torch.int16).view(dtype).float()
    return weight.to(dtype)


def _bits(values: torch.Tensor, bits: tuple[int, ...]) -> torch.Tensor:
    """The numbers that bits of values are, from the highest."""
    return torch.stack([(values >> bit & 1) << i for i, bit in enumerate(reversed(bits))]).sum(dim=0)


def int4_matmul(x: torch.Tensor, words: torch.Tensor, factors: torch.Tensor, group_size: int) -> torch.Tensor:
    """x `[M, K]` times a matrix `[N, K]` -> `[M, N]`.

    int32 `words` `[ceil(K / 128), N, 16]` have tiles of 128 columns: bits 2, 1, 6 and 5 of a column are those of its
    word, 0, 4 and 3 of its nibble. A weight is `(number - 8) * scale + offset`; `factors` `[spans, N, groups of a
    span]`, a span being a tile or a group, whichever is larger, have an offset above a scale, of 16 bits each (int32),
    or a scale alone (int16).
    """
    return (x.float() @ dequantize_int4(words, factors, group_size, x.shape[1], x.dtype).float().T).to(x.dtype)


def eight_bit_matmul(
    x: torch.Tensor, x_scales: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """x `[M, K]` times a matrix `[N, K]` of eight bits -> `[M, N]`; scales by rows, `[M, 1]` and `[N]`."""
    return ((x.float() @ numbers.float().T) * x_scales * scales).to(dtype)


def fp8_block_matmul(x: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor, block_rows: int) -> torch.Tensor:
    """x `[M, K]`, quantized to 128 columns a scale, times a matrix `[N, K]` -> `[M, N]`.

    A weight is `numbers[n, k] * scales[n // block_rows, k // 128]`.
    """
    rows, row_scales = quantize_rows(x.reshape(-1, _BLOCK_COLUMNS), torch.float8_e4m3fn)
    wide_x = (rows.float() * row_scales).view(x.shape)
    wide_scales = scales.repeat_interleave(block_rows, dim=0)[: len(numbers)].repeat_interleave(_BLOCK_COLUMNS, dim=1)
    return (wide_x @ (numbers.float() * wide_scales).T).to(x.dtype)
