"""GGUF's four-bit blocks: unpacked bit for bit, multiplied as closely as bfloat16 allows."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from mmserve.quantization.gguf import grouped_ints
from mmserve.quantization.grouped import MAX_PACKED_ROWS, CpuInt4Weight, can_pack_for_cpu
from mmserve.quantization.scheme import Placement

KINDS = ["Q4_0", "Q4_1"]


def blocks_of(
    kind: str, out_features: int, in_features: int, *, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random blocks, and the matrix that the gguf package reads out of them, float32."""
    values = np.random.default_rng(0).normal(offset, 0.3, (out_features, in_features)).astype(np.float32)
    data = quantize(values, GGMLQuantizationType[kind])
    return torch.from_numpy(data), torch.from_numpy(dequantize(data, GGMLQuantizationType[kind]).copy())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 32), (5, 32), (16, 96), (48, 256)])
def test_unpacks_bit_for_bit(kind: str, out_features: int, in_features: int) -> None:
    data, matrix = blocks_of(kind, out_features, in_features, offset=0.1)
    ints = grouped_ints(data, kind)
    assert (int(ints.numbers.min()), int(ints.numbers.max())) == (0, 15)
    assert ints.scales.shape == ints.offsets.shape == (out_features, in_features // 32)
    assert torch.equal(ints.dequantized(), matrix)


@pytest.mark.parametrize("kind", KINDS)
def test_any_bytes_unpack_as_the_format_says(kind: str) -> None:
    """Nibbles of every value in every place, not only what a quantiser writes."""
    header = {"Q4_0": 2, "Q4_1": 4}[kind]
    generator = np.random.default_rng(1)
    data = generator.integers(0, 256, (3, 4 * (header + 16)), dtype=np.uint8)
    factors = generator.normal(0, 1, (3, 4, header // 2)).astype(np.float16)
    data.reshape(3, 4, -1)[:, :, :header] = factors.view(np.uint8)
    values = grouped_ints(torch.from_numpy(data), kind).dequantized()
    assert torch.equal(values, torch.from_numpy(dequantize(data, GGMLQuantizationType[kind]).copy()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products(kind: str, num_rows: int, has_bias: bool) -> None:
    """Scales are rounded to bfloat16 in the packed product, the matrix is in the prepacked one."""
    data, matrix = blocks_of(kind, 48, 256, offset=0.05)
    weight = CpuInt4Weight(grouped_ints(data, kind))
    x = torch.randn(num_rows, 256, dtype=torch.bfloat16)
    bias = torch.randn(48, dtype=torch.bfloat16) if has_bias else None
    reference = x.double() @ matrix.double().T + (0.0 if bias is None else bias.double())
    out = weight.apply(x, bias)
    assert (out.dtype, out.shape) == (torch.bfloat16, (num_rows, 48))
    assert float((out.double() - reference).norm() / reference.norm()) < 8e-3


@pytest.mark.parametrize("kind", KINDS)
def test_each_row_is_its_own(kind: str) -> None:
    weight = CpuInt4Weight(grouped_ints(blocks_of(kind, 32, 64)[0], kind))
    x = torch.randn(MAX_PACKED_ROWS, 64, dtype=torch.bfloat16)
    together = weight.apply(x, None)
    for i, row in enumerate(x):
        torch.testing.assert_close(weight.apply(row[None], None)[0], together[i], rtol=1.6e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("dtype", "device", "out_features", "bits", "expected"),
    [
        (torch.bfloat16, "cpu", 32, 4, True),
        (torch.bfloat16, "cpu", 16, 4, True),
        (torch.bfloat16, "cpu", 24, 4, False),
        (torch.float32, "cpu", 32, 4, False),
        (torch.bfloat16, "cuda", 32, 4, False),
        (torch.bfloat16, "cpu", 32, 8, False),
    ],
)
def test_what_can_be_packed(dtype: torch.dtype, device: str, out_features: int, bits: int, expected: bool) -> None:
    ints = replace(grouped_ints(blocks_of("Q4_1", out_features, 32)[0], "Q4_1"), bits=bits)
    assert can_pack_for_cpu(ints, Placement(dtype, torch.device(device))) is expected
