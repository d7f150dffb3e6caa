"""Quantized matrices on a CPU with compiled products for a few rows and a copy for more."""

import pytest
import torch
from gguf_models import KINDS, blocks_of

from mmserve.quantization import cpu_few_rows
from mmserve.quantization.cpu_few_rows import (
    MAX_PACKED_ROWS,
    MAX_PACKED_ROWS_WITHOUT_COPY,
    FewRowsWeight,
    can_multiply_few_rows,
)
from mmserve.quantization.cpu_int4 import CpuInt4Weight
from mmserve.quantization.dense import PrepackedWeight
from mmserve.quantization.gguf import grouped_ints
from mmserve.quantization.grouped import Reordered, grouped_weight
from mmserve.quantization.grouped_ints import GroupedInts
from mmserve.quantization.scheme import Placement

CPU = torch.device("cpu")
BFLOAT_CPU = Placement(torch.bfloat16, CPU)
IN = 512


def stored(kind: str, out_features: int = 48) -> GroupedInts:
    return grouped_ints(blocks_of(kind, out_features, IN)[0], kind)


def with_zeros(bits: int, group_size: int, *, out_features: int = 48, in_features: int = IN) -> GroupedInts:
    """As AWQ and GPTQ have them, scales in float16."""
    generator = torch.Generator().manual_seed(bits)
    numbers = torch.randint(0, 1 << bits, (out_features, in_features), dtype=torch.uint8, generator=generator)
    shape = (out_features, in_features // group_size)
    scales = (torch.rand(shape, generator=generator) * 0.05 + 0.01).half()
    zeros = torch.randint(1, 1 << bits, shape, generator=generator)
    return GroupedInts.with_zeros(numbers, scales, zeros, bits=bits, group_size=group_size)


def packing(ints: GroupedInts) -> FewRowsWeight:
    return FewRowsWeight(ints, keeps_copy=True)


def check(ints: GroupedInts, tolerance: float = 4e-3) -> None:
    """A few rows run packed, more by the copy, or unpacked for the call, where the matrix is rounded."""
    copied, packed, matrix = packing(ints), FewRowsWeight(ints, keeps_copy=False), ints.dequantized().double()
    generator = torch.Generator().manual_seed(0)
    bias = torch.randn(ints.out_features, generator=generator).bfloat16()
    cases = [(copied, num_rows) for num_rows in range(1, MAX_PACKED_ROWS + 3)]
    cases += [(packed, MAX_PACKED_ROWS_WITHOUT_COPY + added) for added in (0, 1, 30)]
    for weight, num_rows in cases:
        x = torch.randn(num_rows, matrix.shape[1], generator=generator).bfloat16()
        for added in (None, bias):
            exact = x.double() @ matrix.T + (0.0 if added is None else added.double())
            out = weight.apply(x, added)
            assert (out.dtype, out.shape) == (torch.bfloat16, exact.shape)
            assert float((out.double() - exact).norm() / exact.norm()) < tolerance


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("out_features", [48, 160])
def test_blocks_of_gguf(kind: str, out_features: int) -> None:
    check(stored(kind, out_features))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group_size", [32, 64, 128, IN])
def test_groups_with_zero_points(bits: int, group_size: int) -> None:
    check(with_zeros(bits, group_size))


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_the_packed_product_loses_nothing_but_its_own_rounding(kind: str) -> None:
    """Scales in float16 about a middle of 0 are packed as they are, so the error is that of bfloat16."""
    ints, x = stored(kind), torch.randn(MAX_PACKED_ROWS, IN, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = x.double() @ ints.dequantized().double().T
    slack = 1e-5 * (x.double().abs() @ ints.dequantized().double().abs().T)
    out = packing(ints).apply(x, None)
    assert bool(((out.double() - exact).abs() <= 2.0**-8 * exact.abs() + slack).all())


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_of_one_sign(kind: str) -> None:
    """The errors of what numbers are counted from add up."""
    ints, x = stored(kind), torch.rand(2, IN, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = x.double() @ ints.dequantized().double().T
    assert float((packing(ints).apply(x, None).double() - exact).norm() / exact.norm()) < 3e-3


def test_rows_need_not_lie_side_by_side() -> None:
    weight = packing(stored("Q4_K"))
    x = torch.randn(3, 2 * IN, generator=torch.Generator().manual_seed(0)).bfloat16()
    for view in (x[:, ::2], x[:, IN:], x.view(6, IN)[::2]):
        assert torch.equal(weight.apply(view, None), weight.apply(view.contiguous(), None))


def test_no_rows() -> None:
    assert packing(stored("Q4_0")).apply(torch.empty(0, IN, dtype=torch.bfloat16), None).shape == (0, 48)


def test_numbers_are_not_changed() -> None:
    ints = stored("Q6_K")
    before = ints.numbers.clone(), ints.scales.clone(), ints.offsets.clone()
    packing(ints).apply(torch.ones(2, IN).bfloat16(), None)
    assert all(torch.equal(*pair) for pair in zip(before, (ints.numbers, ints.scales, ints.offsets), strict=True))


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        (BFLOAT_CPU, True),
        (Placement(torch.float32, CPU), False),
        (Placement(torch.float16, CPU), False),
        (Placement(torch.bfloat16, torch.device("cuda")), False),
        (Placement(torch.bfloat16, CPU, keeps_copy=False), True),
        (Placement(torch.bfloat16, CPU, keeps_copy=False, is_small=True), False),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
def test_where_it_is_used(kind: str, placement: Placement, expected: bool) -> None:
    assert can_multiply_few_rows(stored(kind), placement) is expected


@pytest.mark.parametrize(
    ("out_features", "group_size", "expected"),
    [(16, 16, True), (48, 48, True), (48, 96, True), (24, 32, False), (8, 32, False), (48, 8, False), (48, 24, False)],
)
def test_the_sizes_that_it_takes(out_features: int, group_size: int, expected: bool) -> None:
    ints = with_zeros(4, group_size, out_features=out_features, in_features=384)
    assert can_multiply_few_rows(ints, BFLOAT_CPU) is expected
    if expected:
        check(ints)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("keeps_copy", "other"), [(True, PrepackedWeight), (False, CpuInt4Weight)])
def test_other_forms_where_nothing_is_compiled(
    bits: int, keeps_copy: bool, other: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Placement(torch.bfloat16, CPU, keeps_copy)
    assert type(grouped_weight([with_zeros(bits, 32)], place)) is FewRowsWeight
    monkeypatch.setattr(cpu_few_rows, "has_compiled_kernels", lambda: False)
    assert type(grouped_weight([with_zeros(bits, 32)], place)) is other


@pytest.mark.parametrize("num_rows", [1, MAX_PACKED_ROWS, MAX_PACKED_ROWS + 1])
def test_columns_in_another_order(num_rows: int) -> None:
    """GPTQ's activation order, which the copy follows as well."""
    generator = torch.Generator().manual_seed(0)
    plain = with_zeros(4, 64)
    ints = GroupedInts(*_fields(plain), order=torch.randperm(IN, generator=generator))
    weight = grouped_weight([ints], BFLOAT_CPU)
    assert isinstance(weight, Reordered)
    x = torch.randn(num_rows, IN, generator=generator).bfloat16()
    exact = x.double() @ ints.dequantized().double().T
    assert float((weight.apply(x, None).double() - exact).norm() / exact.norm()) < 4e-3


def _fields(ints: GroupedInts) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int]:
    return ints.numbers, ints.scales, ints.offsets, ints.bits, ints.group_size


def test_matrices_are_stacked_by_rows() -> None:
    parts = [stored("Q4_K", out_features) for out_features in (16, 32, 48)]
    x = torch.randn(2, IN, generator=torch.Generator().manual_seed(0)).bfloat16()
    out = grouped_weight(parts, BFLOAT_CPU).apply(x, None)
    exact = x.double() @ torch.cat([part.dequantized() for part in parts]).double().T
    assert float((out.double() - exact).norm() / exact.norm()) < 4e-3
