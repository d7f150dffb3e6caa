"""GGUF's four-bit blocks, computed on the CPU without unpacking them.

Format: llama.cpp's `ggml-common.h`. Q4_0 is `d * (q - 8)`, Q4_1 is `d * q + m`, in blocks of 32 columns.
"""

import torch

from mmserve.quantization.dense import HAS_ONEDNN, PrepackedWeight

BLOCK = 32
# The packed product works on four rows at a time. All of SmolLM2's layers for 1, 4, 5 and 16 rows: 1.9, 3.0, 5.5 and
# 13.1 ms packed; 5.2, 6.1, 5.2 and 7.8 ms as prepacked bf16 (2 cores of an EPYC 9005).
MAX_PACKED_ROWS = 4
_HEADER_BYTES = {"Q4_0": 2, "Q4_1": 4}


class PackedInt4Weight:
    """Four bits for a few rows, prepacked bf16 for many: decoding is bound by memory, prefill by arithmetic.

    Scales and zero points are rounded from float16 to bfloat16, as the packed product takes them.
    """

    def __init__(self, data: torch.Tensor, kind: str, dense: torch.Tensor) -> None:
        """data uint8 `[out, bytes of a row]` in blocks of `kind`; dense bf16 `[out, in]`, the same matrix unpacked."""
        quants, scales, minima = unpack_int4(data, kind)
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(quants, 1)
        zeros = minima + 8.0 * scales
        self._scales_and_zeros = torch.stack((scales, zeros), dim=-1).transpose(0, 1).contiguous().bfloat16()
        self._dense = PrepackedWeight(dense)

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if x.shape[0] > MAX_PACKED_ROWS:
            return self._dense.apply(x, bias)
        out = torch._weight_int4pack_mm_for_cpu(x, self._packed, BLOCK, self._scales_and_zeros)
        return out if bias is None else out + bias


def can_pack_int4(kind: str, dtype: torch.dtype, device: torch.device, out_features: int) -> bool:
    """Whether `PackedInt4Weight` takes blocks of this kind."""
    return (
        kind in _HEADER_BYTES
        and device.type == "cpu"
        and dtype is torch.bfloat16
        and out_features % 16 == 0
        and HAS_ONEDNN
    )


def unpack_int4(data: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks -> quants int32 `[out, in]` in 0..15; scales and minima `[out, in / 32]`, of `scale * q + minimum`."""
    header = _HEADER_BYTES[kind]
    blocks = data.view(data.shape[0], -1, header + BLOCK // 2)
    nibbles = blocks[:, :, header:]
    quants = torch.cat((nibbles & 0xF, nibbles >> 4), dim=-1).to(torch.int32).view(data.shape[0], -1)
    factors = blocks[:, :, :header].contiguous().view(torch.float16).float()
    scales = factors[:, :, 0]
    return quants, scales, factors[:, :, 1] if kind == "Q4_1" else -8.0 * scales
