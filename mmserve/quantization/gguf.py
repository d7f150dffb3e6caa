"""GGUF's blocks of four bits as grouped numbers.

Format: llama.cpp's `ggml-common.h`. Q4_0 is `d * (q - 8)`, Q4_1 is `d * q + m`, in blocks of 32 columns.
"""

import torch

from mmserve.quantization.grouped_ints import GroupedInts

BLOCK = 32
_HEADER_BYTES = {"Q4_0": 2, "Q4_1": 4}


def is_grouped(kind: str) -> bool:
    """Whether `grouped_ints` takes blocks of this kind."""
    return kind in _HEADER_BYTES


def grouped_ints(data: torch.Tensor, kind: str) -> GroupedInts:
    """data uint8 `[out, bytes of a row]` in blocks of `kind`."""
    header = _HEADER_BYTES[kind]
    blocks = data.view(data.shape[0], -1, header + BLOCK // 2)
    nibbles = blocks[:, :, header:]
    numbers = torch.cat((nibbles & 0xF, nibbles >> 4), dim=-1).view(data.shape[0], -1)
    factors = blocks[:, :, :header].contiguous().view(torch.float16).float()
    scales = factors[:, :, 0]
    offsets = factors[:, :, 1] if kind == "Q4_1" else -8.0 * scales
    return GroupedInts(numbers, scales, offsets, bits=4, group_size=BLOCK)
