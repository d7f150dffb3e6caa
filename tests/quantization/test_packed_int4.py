"""GGUF's blocks: unpacked bit for bit, multiplied as closely as bfloat16 allows."""

import pytest
import torch
from gguf_models import KINDS, blocks_of

from mmserve.layers.embedding import BlockEmbedding
from mmserve.quantization import cpu_int4
from mmserve.quantization.cpu_int4 import (
    MAX_PACKED_ROWS,
    CpuInt4Weight,
    can_pack_for_cpu,
    packed_rows,
)
from mmserve.quantization.gguf import grouped_ints
from mmserve.quantization.grouped_ints import FactorParts, GroupedInts
from mmserve.quantization.laid_over import SmallNumbers
from mmserve.quantization.nibble_pairs import factor_of, merged, paired, paired_input, paired_numbers
from mmserve.quantization.packed_nibbles import LayeredNibbles, pieces_of
from mmserve.quantization.packed_scales import PlainScales, packed_scales
from mmserve.quantization.scheme import Placement


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 256), (5, 512), (48, 768)])
def test_unpacks_bit_for_bit(kind: str, out_features: int, in_features: int) -> None:
    data, matrix = blocks_of(kind, out_features, in_features)
    ints = grouped_ints(data, kind)
    bits, group_size, _ = KINDS[kind]
    assert (ints.bits, ints.group_size, int(ints.numbers.max())) == (bits, group_size, (1 << bits) - 1)
    assert ints.scales.shape == ints.offsets.shape == (out_features, in_features // group_size)
    assert torch.equal(ints.dequantized(), matrix)


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_are_the_same_matrix(kind: str) -> None:
    """By their formula alone, in double precision."""
    ints = grouped_ints(blocks_of(kind, 7, 512)[0], kind)
    if ints.bits == 4:
        assert factor_of(ints.bits) == 1
        return
    halves, factor = paired(ints), factor_of(ints.bits)
    assert (int(halves.numbers.max()), halves.group_size) == (15, 2 * ints.group_size)
    expected = ints.dequantized().double()
    torch.testing.assert_close(
        merged(halves.dequantized().double(), ints.group_size, factor), expected, atol=1e-6, rtol=1e-5
    )
    x = torch.randn(3, 512, dtype=torch.float64)
    out = paired_input(x, ints.group_size, factor) @ halves.dequantized().double().T
    torch.testing.assert_close(out, x @ expected.T, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_rows", [1, 5, MAX_PACKED_ROWS, MAX_PACKED_ROWS + 1])
@pytest.mark.parametrize("out_features", [48, 144, 320])
def test_products(kind: str, num_rows: int, out_features: int) -> None:
    """Scales are rounded to bfloat16 in the packed product, the matrix is in the others; blocks of rows may be left."""
    data, matrix = blocks_of(kind, out_features, 512)
    weight = CpuInt4Weight(grouped_ints(data, kind))
    x = torch.randn(num_rows, 512, dtype=torch.bfloat16)
    bias = torch.randn(out_features, dtype=torch.bfloat16)
    for added in (None, bias):
        reference = x.double() @ matrix.double().T + (0.0 if added is None else added.double())
        out = weight.apply(x, added)
        assert (out.dtype, out.shape) == (torch.bfloat16, (num_rows, out_features))
        assert float((out.double() - reference).norm() / reference.norm()) < 8e-3


@pytest.mark.parametrize("kind", KINDS)
def test_each_row_is_its_own(kind: str) -> None:
    weight = CpuInt4Weight(grouped_ints(blocks_of(kind, 32, 256)[0], kind))
    x = torch.randn(4, 256, dtype=torch.bfloat16)
    together = weight.apply(x, None)
    for i, row in enumerate(x):
        torch.testing.assert_close(weight.apply(row[None], None)[0], together[i], rtol=1.6e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("dtype", "device", "out_features", "kind", "keeps_copy", "expected"),
    [
        (torch.bfloat16, "cpu", 32, "Q4_1", False, True),
        (torch.bfloat16, "cpu", 16, "Q4_K", False, True),
        (torch.bfloat16, "cpu", 24, "Q4_1", False, False),
        (torch.float32, "cpu", 32, "Q4_1", False, False),
        (torch.bfloat16, "cuda", 32, "Q4_1", False, False),
        (torch.bfloat16, "cpu", 32, "Q4_1", True, False),
        (torch.bfloat16, "cpu", 32, "Q8_0", False, True),
        (torch.bfloat16, "cpu", 32, "Q6_K", False, True),
    ],
)
def test_what_can_be_packed(
    dtype: torch.dtype, device: str, out_features: int, kind: str, keeps_copy: bool, expected: bool
) -> None:
    ints = grouped_ints(blocks_of(kind, out_features, 256)[0], kind)
    assert can_pack_for_cpu(ints, Placement(dtype, torch.device(device), keeps_copy)) is expected


@pytest.mark.parametrize("block", [16, 32, 48, 64])
def test_where_the_packed_layout_has_its_rows(block: int) -> None:
    assert packed_rows(block).sort().values.tolist() == list(range(block))
    numbers = torch.randint(0, 16, (block, 64), dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 1).view(64, -1)
    halves = torch.cat((packed & 0xF, packed >> 4), dim=1)
    assert torch.equal(halves[:, packed_rows(block)].T.int(), numbers)


@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_are_unpacked_row_by_row(kind: str) -> None:
    data, matrix = blocks_of(kind, 32, 256)
    embedding = BlockEmbedding(data, kind, Placement(torch.float32, torch.device("cpu")))
    ids = torch.tensor([3, 31, 3, 0])
    assert torch.equal(embedding(ids), matrix[ids])
    x = torch.randn(2, 256)
    torch.testing.assert_close(embedding.as_head().apply(x, None), x @ matrix.T)


def assert_is_the_same(ints: GroupedInts) -> None:
    """What is taken apart and multiplied out are the very numbers, and so are products, in pieces as whole."""
    small, factor = CpuInt4Weight(ints), factor_of(ints.bits)
    numbers = paired_numbers(ints.numbers, ints.bits, small._group_size) if factor > 1 else ints.numbers
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers.to(torch.int32), 1)
    scales = PlainScales(ints, ints.group_size // small._group_size)
    for start, stop in pieces_of(ints.out_features, 128):
        assert torch.equal(small._nibbles.rows(start, stop), packed[start:stop])
        assert torch.equal(small._scales.pairs(start, stop), scales.pairs(start, stop))
        assert small._scales.pairs(start, stop).is_contiguous()
    assert isinstance(small._nibbles, LayeredNibbles) is (ints.bits not in (4, 8))
    x = torch.randn(3, numbers.shape[1] // (2 if factor > 1 else 1), dtype=torch.bfloat16)
    halves = x if factor == 1 else paired_input(x, small._group_size, factor)
    pairs = scales.pairs(0, ints.out_features)
    whole = torch._weight_int4pack_mm_for_cpu(halves, packed, small._packed_group_size, pairs)
    assert torch.equal(small.apply(x, None), whole)


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that a matrix has several."""
    monkeypatch.setattr(cpu_int4, "_PIECE_BYTES", 1 << 16)
    monkeypatch.setattr(cpu_int4, "_PIECE_GROUPS", 1 << 11)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("out_features", [16, 112, 128, 2096])
def test_small_blocks_are_the_same(kind: str, out_features: int, pieces: None) -> None:
    """The last piece is a smaller block."""
    assert_is_the_same(grouped_ints(blocks_of(kind, out_features, 512)[0], kind))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("group_size", [32, 128, 192, 768])
@pytest.mark.parametrize("zeros", ["of the middle", "of all values", "of few values"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_small_groups_are_the_same(bits: int, group_size: int, zeros: str, dtype: torch.dtype, pieces: None) -> None:
    """Among them such as are several of the product's, and scales of 0."""
    shape = (144, 768 // group_size)
    scales = torch.randn(shape).to(dtype)
    scales[::7] = 0.0
    points = torch.full(shape, 1 << (bits - 1))
    if zeros != "of the middle":
        points = torch.randint(1, 4 if zeros == "of few values" else (1 << bits) + 1, shape)
    numbers = torch.randint(0, 1 << bits, (144, 768), dtype=torch.uint8)
    assert_is_the_same(GroupedInts.with_zeros(numbers, scales, points, bits=bits, group_size=group_size))


@pytest.mark.parametrize("lowest", [-16, 0, 3])
@pytest.mark.parametrize("span", [0, 1, 3, 4, 15, 16, 255])
@pytest.mark.parametrize("num_groups", [1, 3, 8])
def test_small_numbers(lowest: int, span: int, num_groups: int) -> None:
    numbers = torch.randint(lowest, lowest + span + 1, (num_groups, 48))
    numbers[0, :2] = torch.tensor([lowest, lowest + span])
    held = SmallNumbers(numbers)
    for start, stop in ((0, 48), (16, 32)):
        assert torch.equal(held.rows(start, stop).expand(num_groups, stop - start), numbers[:, start:stop].float())


def test_offsets_of_zero_and_those_that_are_of_no_parts() -> None:
    """The first are not held; with nothing known about them the second are, beside the scales."""
    numbers, scales = torch.zeros(16, 64, dtype=torch.uint8), torch.randn(16, 2)
    middle = GroupedInts(numbers, scales, -8.0 * scales, bits=4, group_size=32)
    assert not isinstance(packed_scales(middle, 1), PlainScales)
    assert_is_the_same(middle)
    assert isinstance(packed_scales(GroupedInts(numbers, scales, scales, 4, 32), 1), PlainScales)


def test_rows_whose_parts_differ_are_held_apart() -> None:
    data = [grouped_ints(blocks_of(kind, 32, 512)[0], kind) for kind in ("Q4_0", "Q4_1", "Q4_K", "Q4_K")]
    assert [data[i].is_like(data[i + 1]) for i in range(3)] == [False, False, True]
    stacked = GroupedInts.stacked(data[2:])
    assert isinstance(stacked.parts, FactorParts)
    assert torch.equal(stacked.parts.offsets(stacked.parts.scales()), torch.cat([data[2].offsets, data[3].offsets]))
