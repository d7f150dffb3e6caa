"""Products of a few rows with a quantized matrix, on a CPU: the matrix is read once, as it is packed.

Shapes: T rows, K columns in, N columns out; groups of G columns in share a scale and an offset.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from llvmlite import ir
from numba.core import types
from numba.extending import register_jitable

from mmserve.kernels import simd
from mmserve.kernels.jit import Kernel, float_bits
from mmserve.kernels.openmp import scratch, share_of, thread_number

# Rows that are multiplied at once, and chains of additions for each of them, which a processor runs side by side.
_CHAINS = {1: 4, 2: 2, 4: 2, 8: 1}
_MAX_ROWS = max(_CHAINS)
_WORDS_BYTES = 4 * simd.LANES


# The largest factor of a matrix is moved to this power of two, from where float16 is exact for most formats' factors.
_LARGEST = 14


@dataclass(frozen=True)
class PackedMatrix:
    """`data` int32 `[N / 16, K / G, G * bits / 32 + 1, 16]` has for each 16 columns out, group by group: words of 32
    bits with 8 numbers of four bits, or 4 of eight; in float16, 16 scales, and 16 times what the number in the middle
    of the range stands for. All of it is `factor` times as large.
    """

    data: torch.Tensor
    factor: float
    bits: int


def pack(numbers: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor, bits: int) -> PackedMatrix:
    """Of `numbers * scales + offsets`: uint8 `[N, K]` below `2 ** bits`, float32 `[N, K / G]` each.

    N and G are multiples of 16. Fewer bits than four, or eight, are held as so many, in the middle of their range.
    """
    num_groups = scales.shape[1]
    width = 4 if bits <= 4 else 8
    to_middle = (1 << (width - 1)) - (1 << (bits - 1))
    digits = numbers + to_middle if to_middle else numbers
    as_bytes = digits if width == 8 else digits[:, ::2] | digits[:, 1::2] << 4
    words = (
        as_bytes.contiguous()
        .view(torch.int32)
        .view(-1, simd.LANES, num_groups, numbers.shape[1] * width // 32 // num_groups)
    )
    # The middle is smaller than the offset, and loses less.
    factors = torch.stack((scales, torch.add(offsets, scales, alpha=1 << (bits - 1))))
    _, exponent = math.frexp(float(factors.abs().nan_to_num(0.0, 0.0).max()))
    halves = torch.ldexp(factors, torch.tensor(_LARGEST - exponent)).half()
    halves = halves.view(2, -1, simd.LANES, num_groups).permute(1, 3, 0, 2).flatten().view(torch.int32)
    data = torch.cat((words.permute(0, 2, 3, 1), halves.view(-1, num_groups, 1, simd.LANES)), dim=2)
    return PackedMatrix(data, math.ldexp(1.0, exponent - _LARGEST), width)


def product(x: torch.Tensor, matrix: PackedMatrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x bfloat16 `[T, K]`, contiguous, bias `[N]` -> bfloat16 `[T, N]`, accumulated in float32."""
    num_rows, in_features = x.shape
    num_blocks, num_groups, _, _ = matrix.data.shape
    out_features, threads = num_blocks * simd.LANES, torch.get_num_threads()
    pieces = [(start, *_piece(num_rows - start)) for start in range(0, num_rows, _MAX_ROWS)]
    out = x.new_empty(sum(size for _, _, size in pieces), out_features)
    sizes = num_blocks, num_groups, in_features // num_groups, float_bits(matrix.factor)
    wide, added = scratch(threads * _MAX_ROWS * (in_features + num_groups)), 0 if bias is None else bias
    for start, valid, size in pieces:
        rows, outs = (x[start:], out[start:]) if start else (x, out)
        _kernel(size, matrix.bits)(threads, rows, valid, matrix.data, outs, wide, *sizes, added)
    return out if len(out) == num_rows else out[:num_rows]


def transposed(matrix: PackedMatrix, start: int, stop: int) -> torch.Tensor:
    """The rows `start` to `stop` of the matrix, multiples of 16, as columns of a bfloat16 `[K, stop - start]`."""
    num_groups, words_of_group = matrix.data.shape[1:3]
    group_size = (words_of_group - 1) * 32 // matrix.bits
    out = torch.empty(num_groups * group_size, stop - start, dtype=torch.bfloat16)
    blocks = matrix.data[start // simd.LANES : stop // simd.LANES]
    sizes = len(blocks), num_groups, group_size, float_bits(matrix.factor)
    _unpack_kernel(matrix.bits)(torch.get_num_threads(), blocks, out, *sizes)
    return out


def _piece(num_left: int) -> tuple[int, int]:
    """How many of the rows left are multiplied next, and of the kernel for how many."""
    num_next = min(num_left, _MAX_ROWS)
    return num_next, next(size for size in _CHAINS if size >= num_next)


def compile_product(matrix: PackedMatrix) -> None:
    """Now, rather than when it is needed."""
    for num_rows in _CHAINS:
        _kernel(num_rows, matrix.bits)
    _unpack_kernel(matrix.bits)


@cache
def _kernel(num_rows: int, bits: int) -> Kernel:
    num_sums, numbers_of_word = num_rows * _CHAINS[num_rows], 32 // bits

    def kernel(arguments: Any) -> None:
        x, num_valid, packed, out, wide, num_blocks, num_groups, group_size, factor, bias = simd.unpack(
            arguments, 0, 10
        )
        first, last = share_of(num_blocks)
        if first == last:
            return
        wide_row, num_words = 4 * num_groups * (group_size + 1), group_size // numbers_of_word
        wide += thread_number() * num_rows * wide_row
        sums = wide + 4 * num_groups * group_size
        for row in range(num_rows):
            # Rows past the last are there to be worked on, whatever they hold.
            x_at = x + min(row, num_valid - 1) * 2 * num_groups * group_size
            _widen_groups(x_at, wide + row * wide_row, sums + row * wide_row, num_groups, group_size)
        packed += first * num_groups * (num_words + 1) * _WORDS_BYTES
        for block in range(first, last):
            totals, column = simd.many_zeros(num_rows), wide
            for group in range(num_groups):
                partial = simd.many_zeros(num_sums)
                for _ in range(num_words):
                    simd.prefetch(packed)
                    words = simd.load_ints(packed)
                    partial = _multiply_words(partial, words, column, wide_row, num_rows, bits)
                    packed += _WORDS_BYTES
                    column += 4 * numbers_of_word
                simd.prefetch(packed)
                totals = _close_group(totals, partial, packed, sums + 4 * group, wide_row, bits)
                packed += _WORDS_BYTES
            added = simd.zeros()
            if bias != 0:
                added = simd.load_bfloats(bias + simd.VECTOR_BYTES * block)
            _store_rows(
                totals,
                out + simd.VECTOR_BYTES * block,
                simd.VECTOR_BYTES * num_blocks,
                simd.float_of_bits(factor),
                added,
            )

    return Kernel(kernel, num_rows, bits)


@cache
def _unpack_kernel(bits: int) -> Kernel:
    numbers_of_word = 32 // bits

    def kernel(arguments: Any) -> None:
        packed, out, num_blocks, num_groups, group_size, factor_bits = simd.unpack(arguments, 0, 6)
        factor = simd.splat(simd.float_of_bits(factor_bits))
        first, last = share_of(num_blocks)
        row_bytes, num_words = simd.VECTOR_BYTES * num_blocks, group_size // numbers_of_word
        packed += first * num_groups * (num_words + 1) * _WORDS_BYTES
        for block in range(first, last):
            column = out + simd.VECTOR_BYTES * block
            for _ in range(num_groups):
                factors = packed + num_words * _WORDS_BYTES
                for at in range(packed, factors, _WORDS_BYTES):
                    _store_columns(simd.load_ints(at), factors, factor, column, row_bytes, bits)
                    column += numbers_of_word * row_bytes
                packed = factors + _WORDS_BYTES

    return Kernel(kernel, bits)


@register_jitable  # type: ignore[untyped-decorator]
def _widen_groups(x: int, wide: int, sums: int, num_groups: int, group_size: int) -> None:
    """A row of bfloat16 as float32, and the sum of each group."""
    for group in range(num_groups):
        sum_of_group = simd.zeros()
        for _ in range(0, group_size, simd.LANES):
            values = simd.load_bfloats(x)
            simd.store_floats(wide, values)
            sum_of_group = simd.add(sum_of_group, values)
            x += simd.VECTOR_BYTES
            wide += 4 * simd.LANES
        simd.store_float(sums + 4 * group, simd.total(sum_of_group))


@simd.operation(lambda partial, *_: partial, simd.Ints, types.int64, types.int64, num_tuples=1, num_constants=2)
def _multiply_words(
    builder: simd.Builder,
    partial: list[simd.Value],
    words: simd.Value,
    columns: simd.Value,
    row_bytes: simd.Value,
    num_rows: int,
    bits: int,
) -> list[simd.Value]:
    """Partial sums with the products of the words' numbers and as many columns of each row."""
    num_chains = len(partial) // num_rows
    for i in range(32 // bits):
        numbers = _emit_numbers(builder, words, i, bits)
        column = builder.add(columns, ir.Constant(simd.LONG, 4 * i))
        for row in range(num_rows):
            value = simd.emit_splat(builder, simd.emit_load(builder, column, simd.FLOAT))
            at = row * num_chains + i % num_chains
            partial[at] = simd.emit_fma(builder, value, numbers, partial[at])
            column = builder.add(column, row_bytes)
    return partial


@simd.operation(lambda totals, *_: totals, types.int64, types.int64, types.int64, num_tuples=2, num_constants=1)
def _close_group(
    builder: simd.Builder,
    totals: list[simd.Value],
    partial: list[simd.Value],
    factors: simd.Value,
    sums: simd.Value,
    row_bytes: simd.Value,
    bits: int,
) -> list[simd.Value]:
    """Totals with the products of a group; `sums` of its columns are for what numbers are counted from."""
    scales, offsets = _emit_factors(builder, factors, bits)
    num_chains = len(partial) // len(totals)
    for row in range(len(totals)):
        first, *others = partial[row * num_chains : (row + 1) * num_chains]
        for other in others:
            first = builder.fadd(first, other)
        total = simd.emit_fma(builder, scales, first, totals[row])
        value = simd.emit_splat(builder, simd.emit_load(builder, sums, simd.FLOAT))
        totals[row] = simd.emit_fma(builder, offsets, value, total)
        sums = builder.add(sums, row_bytes)
    return totals


@simd.operation(types.void, types.int64, types.int64, types.float32, simd.Floats, num_tuples=1)
def _store_rows(
    builder: simd.Builder,
    totals: list[simd.Value],
    address: simd.Value,
    row_bytes: simd.Value,
    factor: simd.Value,
    added: simd.Value,
) -> None:
    factors = simd.emit_splat(builder, factor)
    for total in totals:
        simd.emit_store_bfloats(builder, address, simd.emit_fma(builder, total, factors, added))
        address = builder.add(address, row_bytes)


@simd.operation(types.void, simd.Ints, types.int64, simd.Floats, types.int64, types.int64, num_constants=1)
def _store_columns(
    builder: simd.Builder,
    words: simd.Value,
    factors: simd.Value,
    factor: simd.Value,
    address: simd.Value,
    row_bytes: simd.Value,
    bits: int,
) -> None:
    scales, offsets = (builder.fmul(part, factor) for part in _emit_factors(builder, factors, bits))
    for i in range(32 // bits):
        values = simd.emit_fma(builder, _emit_numbers(builder, words, i, bits), scales, offsets)
        simd.emit_store_bfloats(builder, address, values)
        address = builder.add(address, row_bytes)


def _emit_numbers(builder: simd.Builder, words: simd.Value, i: int, bits: int) -> simd.Value:
    """The i-th numbers of words, put into the upper bits of the mantissa of a power of two: so much they are too large.

    2 ** bits where a number has `bits`.
    """
    shift, mask = 23 - bits - bits * i, ((1 << bits) - 1) << (23 - bits)
    shifted = builder.shl(words, simd.int_lanes(shift)) if shift > 0 else words
    shifted = builder.lshr(words, simd.int_lanes(-shift)) if shift < 0 else shifted
    power = simd.int_lanes(float_bits(float(1 << bits)))
    return builder.bitcast(builder.or_(builder.and_(shifted, simd.int_lanes(mask)), power), simd.FLOATS)


def _emit_factors(builder: simd.Builder, address: simd.Value, bits: int) -> tuple[simd.Value, simd.Value]:
    """Scales and offsets of what `_emit_numbers` gives."""
    scales = simd.emit_load_halves(builder, address)
    middles = simd.emit_load_halves(builder, builder.add(address, ir.Constant(simd.LONG, simd.VECTOR_BYTES)))
    middle = float((1 << bits) + (1 << (bits - 1)))
    return scales, simd.emit_fma(builder, simd.float_lanes(-middle), scales, middles)
