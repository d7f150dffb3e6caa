"""The kernels of quantized products in plain PyTorch: twins of the same signatures."""

import torch

FP8_MAX = 448.0
_SMALLEST_SCALE = 1e-12
_NIBBLES, _TILE_WORDS, _MIDDLE = 8, 16, 8
_BLOCK_COLUMNS = 128


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x `[M, K]` -> FP8 (E4M3) `[M, K]` and float32 scales `[M, 1]`, a row's largest value at the end of the range."""
    scales = (x.float().abs().amax(dim=-1, keepdim=True) / FP8_MAX).clamp(min=_SMALLEST_SCALE)
    return (x.float() / scales).to(torch.float8_e4m3fn), scales


def dequantize_int4(
    words: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
    group_size: int,
    num_columns: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The matrix `[N, K]`; see `int4_matmul`."""
    shifts = 4 * torch.arange(_NIBBLES, device=words.device)
    nibbles = (words[:, :, None, :] >> shifts[:, None]) & 0xF
    numbers = nibbles.transpose(0, 1).flatten(1)[:, :num_columns] - _MIDDLE
    groups = torch.arange(num_columns, device=words.device) // group_size
    weight = numbers.float() * scales.float().T[:, groups]
    return (weight if offsets is None else weight + offsets.float().T[:, groups]).to(dtype)


def int4_matmul(
    x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None, group_size: int
) -> torch.Tensor:
    """x `[M, K]` times a matrix `[N, K]` -> `[M, N]`.

    int32 `words` `[ceil(K / 128), N, 16]` have column `128 * t + 16 * j + w` in nibble j of word w of tile t. A weight
    is `(number - 8) * scale + offset`, with `scales` and `offsets` `[K / group_size, N]`.
    """
    weight = dequantize_int4(words, scales, offsets, group_size, x.shape[1], torch.float32)
    return (x.float() @ weight.T).to(x.dtype)


def fp8_block_matmul(x: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor, block_rows: int) -> torch.Tensor:
    """x `[M, K]`, quantized to 128 columns a scale, times a matrix `[N, K]` -> `[M, N]`.

    A weight is `numbers[n, k] * scales[n // block_rows, k // 128]`.
    """
    rows, row_scales = quantize_rows(x.reshape(-1, _BLOCK_COLUMNS))
    wide_x = (rows.float() * row_scales).view(x.shape)
    wide_scales = scales.repeat_interleave(block_rows, dim=0)[: len(numbers)].repeat_interleave(_BLOCK_COLUMNS, dim=1)
    return (wide_x @ (numbers.float() * wide_scales).T).to(x.dtype)
