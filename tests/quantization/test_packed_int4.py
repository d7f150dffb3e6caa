"""GGUF's four-bit blocks: unpacked bit for bit, multiplied as closely as bfloat16 allows."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from mmserve.quantization.gguf import MAX_PACKED_ROWS, PackedInt4Weight, can_pack_int4, unpack_int4

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
    quants, scales, minima = unpack_int4(data, kind)
    assert quants.dtype is torch.int32
    assert (int(quants.min()), int(quants.max())) == (0, 15)
    assert scales.shape == minima.shape == (out_features, in_features // 32)
    spread = quants.view(out_features, -1, 32)
    assert torch.equal((scales[..., None] * spread + minima[..., None]).view(matrix.shape), matrix)


@pytest.mark.parametrize("kind", KINDS)
def test_any_bytes_unpack_as_the_format_says(kind: str) -> None:
    """Nibbles of every value in every place, not only what a quantiser writes."""
    header = {"Q4_0": 2, "Q4_1": 4}[kind]
    generator = np.random.default_rng(1)
    data = generator.integers(0, 256, (3, 4 * (header + 16)), dtype=np.uint8)
    factors = generator.normal(0, 1, (3, 4, header // 2)).astype(np.float16)
    data.reshape(3, 4, -1)[:, :, :header] = factors.view(np.uint8)
    quants, scales, minima = unpack_int4(torch.from_numpy(data), kind)
    values = (scales[..., None] * quants.view(3, 4, 32) + minima[..., None]).view(3, -1)
    assert torch.equal(values, torch.from_numpy(dequantize(data, GGMLQuantizationType[kind]).copy()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products(kind: str, num_rows: int, has_bias: bool) -> None:
    """Scales are rounded to bfloat16 in the packed product, the matrix is in the prepacked one."""
    data, matrix = blocks_of(kind, 48, 256, offset=0.05)
    weight = PackedInt4Weight(data, kind, matrix.bfloat16())
    x = torch.randn(num_rows, 256, dtype=torch.bfloat16)
    bias = torch.randn(48, dtype=torch.bfloat16) if has_bias else None
    reference = x.double() @ matrix.double().T + (0.0 if bias is None else bias.double())
    out = weight.apply(x, bias)
    assert (out.dtype, out.shape) == (torch.bfloat16, (num_rows, 48))
    assert float((out.double() - reference).norm() / reference.norm()) < 8e-3


@pytest.mark.parametrize("kind", KINDS)
def test_each_row_is_its_own(kind: str) -> None:
    data, matrix = blocks_of(kind, 32, 64)
    weight = PackedInt4Weight(data, kind, matrix.bfloat16())
    x = torch.randn(MAX_PACKED_ROWS, 64, dtype=torch.bfloat16)
    together = weight.apply(x, None)
    for i, row in enumerate(x):
        torch.testing.assert_close(weight.apply(row[None], None)[0], together[i], rtol=1.6e-2, atol=1e-2)


def test_few_rows_go_packed_and_many_go_dense() -> None:
    """With a dense twin that is all zeros one sees which of the two was asked."""
    data, matrix = blocks_of("Q4_1", 16, 32)
    weight = PackedInt4Weight(data, "Q4_1", torch.zeros(16, 32, dtype=torch.bfloat16))
    x = torch.randn(MAX_PACKED_ROWS + 1, 32, dtype=torch.bfloat16)
    assert bool(weight.apply(x[:MAX_PACKED_ROWS], None).any())
    assert not bool(weight.apply(x, None).any())
    assert MAX_PACKED_ROWS == 4
    assert bool(matrix.any())


@pytest.mark.parametrize(
    ("kind", "dtype", "device", "out_features", "expected"),
    [
        ("Q4_0", torch.bfloat16, "cpu", 32, True),
        ("Q4_1", torch.bfloat16, "cpu", 16, True),
        ("Q4_1", torch.bfloat16, "cpu", 24, False),
        ("Q4_1", torch.float32, "cpu", 32, False),
        ("Q4_1", torch.bfloat16, "cuda", 32, False),
        ("Q8_0", torch.bfloat16, "cpu", 32, False),
        ("", torch.bfloat16, "cpu", 32, False),
    ],
)
def test_what_can_be_packed(kind: str, dtype: torch.dtype, device: str, out_features: int, expected: bool) -> None:
    assert can_pack_int4(kind, dtype, torch.device(device), out_features) is expected
