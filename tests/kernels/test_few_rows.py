"""Products of a few rows with a packed matrix: the layout bit for bit, the products against float64."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from compiled_kernels import is_rounded_once, random_bfloats, torch_threads

from mmserve.kernels import few_rows

BITS = [4, 8]
GROUP_SIZES = [16, 32, 64, 128]


@dataclass(frozen=True)
class Matrix:
    """Numbers uint8 `[N, K]`, scales and offsets `[N, K / G]` in float32."""

    numbers: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor
    bits: int

    def packed(self) -> few_rows.PackedMatrix:
        return few_rows.pack(self.numbers, self.scales, self.offsets, self.bits)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return few_rows.product(x, self.packed())

    def exact(self, x: torch.Tensor) -> torch.Tensor:
        """In float64, of the factors as they are packed."""
        numbers, scales, middles = read_back(self.packed())
        wide = numbers.shape[1] // scales.shape[1]
        scales, middles = (factors.repeat_interleave(wide, dim=1) for factors in (scales, middles))
        return x.double() @ ((numbers - (1 << (self.bits - 1))) * scales + middles).T

    def slack(self, x: torch.Tensor) -> torch.Tensor:
        """Of sums in float32 of numbers that are larger by `2 ** bits`, of which as much is subtracted."""
        largest = 4 * (1 << self.bits) * self.scales.double().abs() + self.offsets.double().abs()
        wide = self.numbers.shape[1] // largest.shape[1]
        return 5e-7 * (x.double().abs() @ largest.repeat_interleave(wide, dim=1).T)


def random_matrix(bits: int, out_features: int, in_features: int, group_size: int, *, offset: float = 1.0) -> Matrix:
    generator = torch.Generator().manual_seed(bits + out_features + in_features + group_size)
    shape = (out_features, in_features // group_size)
    return Matrix(
        torch.randint(0, 1 << bits, (out_features, in_features), dtype=torch.uint8, generator=generator),
        torch.randn(shape, generator=generator) * 0.1,
        torch.randn(shape, generator=generator) * offset,
        bits,
    )


def constant_matrix(numbers: torch.Tensor, bits: int, *, scale: float = 1.0, offset: float = 0.0) -> Matrix:
    """In groups of 32."""
    shape = (numbers.shape[0], numbers.shape[1] // 32)
    return Matrix(numbers, torch.full(shape, scale), torch.full(shape, offset), bits)


def read_back(packed: few_rows.PackedMatrix) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers, scales, and values of the number in the middle, in float64, as the class says they lie."""
    words = packed.data.numpy().view(np.uint32)
    num_blocks, num_groups, num_words, lanes = words.shape
    numbers_of_word = 32 // packed.bits
    numbers = np.empty((num_blocks, lanes, num_groups, (num_words - 1) * numbers_of_word))
    for column in range(numbers.shape[-1]):
        word, digit = divmod(column, numbers_of_word)
        digits = (words[:, :, word] >> np.uint32(packed.bits * digit)) & np.uint32((1 << packed.bits) - 1)
        numbers[..., column] = digits.transpose(0, 2, 1)
    halves = np.ascontiguousarray(words[:, :, -1]).view(np.float16).astype(np.float64) * packed.factor
    factors = halves.reshape(num_blocks, num_groups, 2, lanes).transpose(2, 0, 3, 1).reshape(2, -1, num_groups)
    scales, middles = torch.from_numpy(factors).unbind()
    return torch.from_numpy(numbers.reshape(len(scales), -1)), scales, middles


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize(("out_features", "num_groups"), [(16, 1), (16, 2), (32, 1), (48, 3), (96, 2)])
def test_packing_is_read_back(bits: int, group_size: int, out_features: int, num_groups: int) -> None:
    matrix = random_matrix(bits, out_features, num_groups * group_size, group_size)
    packed = matrix.packed()
    assert packed.data.dtype is torch.int32
    assert packed.data.is_contiguous()
    assert packed.data.shape == (out_features // 16, num_groups, group_size * bits // 32 + 1, 16)
    numbers, scales, middles = read_back(packed)
    assert torch.equal(numbers, matrix.numbers.double())
    expected = matrix.offsets.double() + (1 << (bits - 1)) * matrix.scales.double()
    torch.testing.assert_close(scales, matrix.scales.double(), rtol=2.0**-11, atol=1e-7)
    torch.testing.assert_close(middles, expected, rtol=2.0**-11 + 1e-6, atol=1e-7)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", [1e-30, 1e-7, 1.0, 3e4, 1e30])
def test_factors_in_float16_are_kept_as_they_are(bits: int, size: float) -> None:
    """However large, where they differ by no more than 13 binary places, and the zero point is in the middle."""
    generator = torch.Generator().manual_seed(0)
    power = 2.0 ** round(math.log2(size))
    scales = torch.randn(48, 4, generator=generator).half()
    scales[scales.abs() < 2.0**-13] = 0.0
    scales = scales.float() * power
    numbers = torch.randint(0, 1 << bits, (48, 128), dtype=torch.uint8, generator=generator)
    _, packed_scales, middles = read_back(Matrix(numbers, scales, -scales * (1 << (bits - 1)), bits).packed())
    assert torch.equal(packed_scales, scales.double())
    assert not bool(middles.any())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("out_features", [16, 48, 96])
def test_product(bits: int, group_size: int, out_features: int) -> None:
    """Of 16 columns out there is one block, which is fewer than threads."""
    matrix = random_matrix(bits, out_features, 384, group_size)
    packed, x = matrix.packed(), random_bfloats(9, 384)
    before = packed.data.clone(), x.clone()
    exact, slack = matrix.exact(x), matrix.slack(x)
    for threads in (1, 2, 3):
        with torch_threads(threads):
            outs = [few_rows.product(x[:num_rows], packed) for num_rows in range(1, 10)]
        assert all(is_rounded_once(out, exact[: len(out)], slack[: len(out)]) for out in outs)
    assert torch.equal(packed.data, before[0])
    assert torch.equal(x, before[1])


@pytest.mark.parametrize("bits", BITS)
def test_a_single_group(bits: int) -> None:
    matrix, x = random_matrix(bits, 32, 128, 128), random_bfloats(3, 128)
    assert is_rounded_once(matrix.product(x), matrix.exact(x), matrix.slack(x))


@pytest.mark.parametrize("bits", BITS)
def test_the_matrix_of_a_large_layer(bits: int) -> None:
    matrix, x = random_matrix(bits, 1040, 4096, 64), random_bfloats(5, 4096)
    assert is_rounded_once(matrix.product(x), matrix.exact(x), matrix.slack(x))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group_size", [16, 128])
def test_rows_that_pick_a_column_get_its_very_numbers(bits: int, group_size: int) -> None:
    """Every column stands where it belongs: differences of whole numbers below 256 are exact in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, 1 << bits, (48, 256), dtype=torch.uint8, generator=generator)
    shape = (48, 256 // group_size)
    middle = float(1 << (bits - 1))
    matrix = Matrix(numbers, torch.ones(shape), torch.full(shape, -middle), bits)
    with torch_threads(1):
        out = matrix.product(torch.eye(256).bfloat16())
    assert torch.equal(out.float(), numbers.T.float() - middle)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("num_rows", [1, 2, 4])
def test_extreme_numbers(bits: int, num_rows: int) -> None:
    """256 columns, so that sums of the largest number have eight bits, too."""
    largest, x = (1 << bits) - 1, torch.ones(num_rows, 256).bfloat16()
    zeros = torch.zeros(32, 256, dtype=torch.uint8)
    alternating = zeros.clone()
    alternating[:, ::2] = largest
    for numbers, expected in (
        (zeros, 0),
        (torch.full_like(zeros, largest), largest * 256),
        (alternating, largest * 128),
    ):
        assert torch.equal(
            constant_matrix(numbers, bits).product(x).float(), torch.full((num_rows, 32), float(expected))
        )
        scaled = constant_matrix(numbers, bits, scale=-0.5, offset=0.25).product(x)
        assert is_rounded_once(scaled, torch.full((num_rows, 32), 64.0 - expected / 2), 1e-3)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("num_rows", [1, 3, 4])
@pytest.mark.parametrize("offset", [100.0, 1e4, 1e20])
def test_large_offsets(bits: int, num_rows: int, offset: float) -> None:
    matrix, x = random_matrix(bits, 48, 256, 32, offset=offset), random_bfloats(num_rows, 256)
    assert is_rounded_once(matrix.product(x), matrix.exact(x), matrix.slack(x))


@pytest.mark.parametrize("bits", BITS)
def test_scales_of_zero_leave_the_offsets(bits: int) -> None:
    numbers = torch.full((16, 64), (1 << bits) - 1, dtype=torch.uint8)
    out = constant_matrix(numbers, bits, scale=0.0, offset=0.5).product(torch.ones(2, 64).bfloat16())
    assert torch.equal(out.float(), torch.full((2, 16), 32.0))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_in_its_row(bits: int, value: float) -> None:
    """Rows that run at once, one of eight being a copy."""
    matrix, x = random_matrix(bits, 48, 128, 32), random_bfloats(7, 128)
    clean = matrix.product(x)
    for row in range(7):
        spoilt = x.clone()
        spoilt[row, 77] = value
        with torch_threads(1):
            out = matrix.product(spoilt)
        others = [i for i in range(7) if i != row]
        assert torch.equal(out[others], clean[others])
        assert not bool(out[row].isfinite().any())


@pytest.mark.parametrize("bits", BITS)
def test_threads_change_no_bit(bits: int) -> None:
    matrix, x, outs = random_matrix(bits, 80, 256, 64), random_bfloats(7, 256), []
    for threads in (1, 2, 3, 7):
        with torch_threads(threads):
            outs.append(matrix.product(x))
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_callers_at_the_same_time_do_not_meet() -> None:
    """Each has memory of its own for the rows in float32."""
    matrices = [random_matrix(bits, 64, 512, 64) for bits in (4, 8, 4)]
    xs = [random_bfloats(4, 512, seed=seed) for seed in range(3)]
    expected = [matrix.product(x) for matrix, x in zip(matrices, xs, strict=True)]

    def repeated(i: int) -> bool:
        packed = matrices[i].packed()
        return all(torch.equal(few_rows.product(xs[i], packed), expected[i]) for _ in range(50))

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(repeated, range(3))) == [True, True, True]


def test_no_rows() -> None:
    assert random_matrix(4, 32, 64, 32).product(random_bfloats(0, 64)).shape == (0, 32)


@pytest.mark.parametrize("bits", BITS)
def test_compiling_ahead_leaves_nothing_to_compile(bits: int) -> None:
    matrix = random_matrix(bits, 16, 64, 32)
    few_rows._kernel.cache_clear()
    few_rows.compile_product(matrix.packed())
    compiled = few_rows._kernel.cache_info().misses
    for num_rows in range(1, 18):
        matrix.product(random_bfloats(num_rows, 64))
    assert few_rows._kernel.cache_info().misses == compiled == 4
