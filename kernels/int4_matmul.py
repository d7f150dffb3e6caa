"""Products with a matrix of four bits a number, and the unpacking of one.

The matrix stands on the left of the tensor cores' product, where operands may come from registers (the idea of Marlin,
Frantar et al. 2024, arXiv 2408.11743): numbers go from words to the product without a detour through shared memory. So
that each thread unpacks what it multiplies, a tile of 128 columns of a row is 16 words of eight nibbles: of a column's
seven bits, 2, 1, 6 and 5 are the word's, and 0, 4 and 3 the nibble's. Two nibbles 16 bits apart are neighbours.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from mmserve.kernels.split_k import counters, load_rows, parts_of, splits_for, store_sum

TILE_COLUMNS = 128
TILE_WORDS = 16
# What numbers are counted from.
MIDDLE = 8
_GROUP_SIZES_BELOW_A_TILE = (32, 64)
_BITS_OF_A_COLUMN = (2, 1, 6, 5, 0, 4, 3)

# Four pairs of weights of a word. A nibble becomes the last bits of the mantissa of 128 (bfloat16) or 1024 (float16).
# Added by fma, since cards before Hopper have no sum of two bfloat16.
_UNPACK = """{
    .reg .b32 shifted, middle, one, scale, offset;
    mov.b32 middle, MAGIC;
    prmt.b32 scale, $5, $5, 0x1010;
    prmt.b32 offset, $6, $6, 0x1010;
    lop3.b32 $0, $4, 0x000F000F, middle, 0xEA;
    shr.u32 shifted, $4, 4;
    lop3.b32 $1, shifted, 0x000F000F, middle, 0xEA;
    shr.u32 shifted, $4, 8;
    lop3.b32 $2, shifted, 0x000F000F, middle, 0xEA;
    shr.u32 shifted, $4, 12;
    lop3.b32 $3, shifted, 0x000F000F, middle, 0xEA;
    mov.b32 middle, MINUS;
    mov.b32 one, ONE;
    fma.rn.TYPE $0, $0, one, middle;
    fma.rn.TYPE $1, $1, one, middle;
    fma.rn.TYPE $2, $2, one, middle;
    fma.rn.TYPE $3, $3, one, middle;
    fma.rn.TYPE $0, $0, scale, offset;
    fma.rn.TYPE $1, $1, scale, offset;
    fma.rn.TYPE $2, $2, scale, offset;
    fma.rn.TYPE $3, $3, scale, offset;
}"""


def _assembly(number_type: str, magic: str, minus: str, one: str) -> tl.constexpr:
    """`magic` is 128 or 1024 twice, `minus` what takes it and MIDDLE away."""
    values = {"TYPE": number_type, "MAGIC": magic, "MINUS": minus, "ONE": one}
    text = _UNPACK
    for name, value in values.items():
        text = text.replace(name, value)
    return tl.constexpr(text)


_UNPACK_BFLOAT16: tl.constexpr = _assembly("bf16x2", "0x43004300", "0xC308C308", "0x3F803F80")
_UNPACK_FLOAT16: tl.constexpr = _assembly("f16x2", "0x64006400", "0xE408E408", "0x3C003C00")


def takes_groups(group_size: int) -> bool:
    """Whether the kernels take groups of so many columns."""
    return group_size in _GROUP_SIZES_BELOW_A_TILE or group_size % TILE_COLUMNS == 0


def tile_int4(numbers: torch.Tensor) -> torch.Tensor:
    """uint8 `[N, K]` below 16 -> int32 `[ceil(K / 128), N, 16]`; columns beyond K are MIDDLE."""
    padded = F.pad(numbers, (0, -numbers.shape[1] % TILE_COLUMNS), value=MIDDLE).to(torch.int32)
    bits = padded.view(len(numbers), -1, *[2] * 7)
    nibbles = bits.permute(1, 0, *[8 - bit for bit in _BITS_OF_A_COLUMN]).reshape(-1, len(numbers), TILE_WORDS, 8)
    shifts = 4 * torch.arange(8, dtype=torch.int32, device=numbers.device)
    return (nibbles << shifts).sum(dim=3, dtype=torch.int32)


def pack_factors(scales: torch.Tensor, offsets: torch.Tensor | None, group_size: int) -> torch.Tensor:
    """Scales and offsets `[K / group_size, N]` of 16 bits -> `[spans, N, groups of a span]`.

    A span is a tile or a group, whichever is larger. int32 are an offset above a scale, int16 a scale alone.
    """
    in_span = max(TILE_COLUMNS // group_size, 1)
    scale, *offset = (
        F.pad(x, (0, 0, 0, -len(x) % in_span)).view(-1, in_span, x.shape[1]).transpose(1, 2).contiguous()
        for x in ([scales] if offsets is None else [scales, offsets])
    )
    if not offset:
        return scale.view(torch.int16)
    return (offset[0].view(torch.int16).to(torch.int32) << 16) | (scale.view(torch.int16).to(torch.int32) & 0xFFFF)


@dataclass(frozen=True)
class _Tiling:
    """Rows of the matrix and of x a program, pieces of K, warps and stages."""

    block_n: int
    block_m: int
    num_splits: int
    num_warps: int
    num_stages: int


def tiling(num_rows: int, n: int, k: int) -> _Tiling:
    """For x of `num_rows`: few rows are bound by memory, and need all of the card's processors at work.

    The best of some twenty for each of 1 to 512 rows and the matrices of Llama-2-7B, on one H200
    (docs/performance-notes.md).
    """
    most = triton.cdiv(k, TILE_COLUMNS)
    if num_rows <= 16:
        return _Tiling(128, 16, splits_for(triton.cdiv(n, 128), 256, most), 4, 4)
    block_m = 32 if num_rows <= 32 else 64 if num_rows <= 64 else 128
    num_tiles = triton.cdiv(n, 64) * triton.cdiv(num_rows, block_m)
    if block_m < 128:
        return _Tiling(64, block_m, splits_for(num_tiles, 256, most), 4, 4 if block_m == 32 else 3)
    # Two programs fit on a processor with three stages, three with two.
    splits = splits_for(num_tiles, 132, most)
    return _Tiling(64, 128, splits, 4, 3 if num_tiles * splits <= 264 else 2)


@triton.jit
def _weights(b_words, b_factors, HAS_OFFSETS: tl.constexpr, DTYPE: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    """Words and factors `[BLOCK_N, 16]` -> weights `[BLOCK_N, 128]`."""
    BLOCK_N: tl.constexpr = b_words.shape[0]
    b_offsets = b_factors >> 16 if HAS_OFFSETS else tl.zeros_like(b_factors)
    if IS_INTERPRETED:
        b_scale = b_factors.to(tl.uint16).to(DTYPE, bitcast=True).to(tl.float32)
        b_offset = b_offsets.to(tl.uint16).to(DTYPE, bitcast=True).to(tl.float32)
        b_0 = _pair(b_words, b_scale, b_offset, 0, DTYPE)
        b_1 = _pair(b_words, b_scale, b_offset, 4, DTYPE)
        b_2 = _pair(b_words, b_scale, b_offset, 8, DTYPE)
        b_3 = _pair(b_words, b_scale, b_offset, 12, DTYPE)
    else:
        b_0, b_1, b_2, b_3 = tl.inline_asm_elementwise(
            _UNPACK_BFLOAT16 if DTYPE == tl.bfloat16 else _UNPACK_FLOAT16,  # noqa: SIM300
            "=&r,=&r,=&r,=&r,r,r,r",
            [b_words, b_factors, b_offsets],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    b_pairs = tl.join(tl.join(b_0, b_1), tl.join(b_2, b_3))
    b_low = b_pairs.to(tl.uint16).to(DTYPE, bitcast=True)
    b_high = (b_pairs >> 16).to(tl.uint16).to(DTYPE, bitcast=True)
    # Bits of the column: 2, 1, 6, 5 of the word, 3, 4 of the pair, 0 in it.
    b_bits = tl.reshape(tl.join(b_low, b_high), [BLOCK_N, 2, 2, 2, 2, 2, 2, 2])
    return tl.reshape(tl.permute(b_bits, [0, 3, 4, 6, 5, 1, 2, 7]), [BLOCK_N, 128])


@triton.jit
def _pair(b_words, b_scale, b_offset, SHIFT: tl.constexpr, DTYPE: tl.constexpr):
    """What the assembly makes, for the interpreter."""
    b_low = ((b_words >> SHIFT) & 0xF).to(tl.float32) - 8.0
    b_high = ((b_words >> (SHIFT + 16)) & 0xF).to(tl.float32) - 8.0
    b_low = (b_low * b_scale + b_offset).to(DTYPE).to(tl.uint16, bitcast=True).to(tl.int32)
    b_high = (b_high * b_scale + b_offset).to(DTYPE).to(tl.uint16, bitcast=True).to(tl.int32)
    return b_low | (b_high << 16)


@triton.jit
def _load_factors(factors, i_tile, N, o_n, GROUP: tl.constexpr):
    """`[BLOCK_N, 16]`: those of each word of a tile."""
    IN_SPAN: tl.constexpr = 128 // GROUP if GROUP < 128 else 1
    BLOCK_N: tl.constexpr = o_n.shape[0]
    i_span = i_tile * 128 // GROUP if GROUP > 128 else i_tile
    p_factors = factors + (i_span * N + o_n[:, None]) * IN_SPAN + tl.arange(0, IN_SPAN)[None, :]
    b_factors = tl.load(p_factors).to(tl.int32)
    # A group has the words of which bits 6 and 5 of the column say so.
    b_factors = tl.reshape(b_factors, [BLOCK_N, 1, IN_SPAN, 1])
    b_factors = tl.broadcast_to(b_factors, [BLOCK_N, 4, IN_SPAN, 4 // IN_SPAN])
    return tl.reshape(b_factors, [BLOCK_N, 16])


@triton.jit(do_not_specialize=["M", "TILES_A_SPLIT"])
def _int4_matmul_kernel(
    x,
    words,
    factors,
    out,
    parts,
    counters,
    M,
    N,
    K,
    x_stride,
    TILES_A_SPLIT,
    GROUP: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLITS: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    # Programs side by side share rows of the matrix.
    num_m = tl.cdiv(M, BLOCK_M)
    i_n, i_m, i_split = tl.program_id(0) // num_m, tl.program_id(0) % num_m, tl.program_id(1)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o_k = tl.arange(0, 128)
    # Rows beyond the last are computed as the last, and not stored.
    o_row, o_x = tl.minimum(o_n, N - 1), tl.minimum(o_m, M - 1)
    p_words = words + o_row[:, None] * 16 + tl.arange(0, 16)[None, :]
    p_x = x + o_x[:, None].to(tl.int64) * x_stride
    first = i_split * TILES_A_SPLIT
    HAS_OFFSETS: tl.constexpr = factors.dtype.element_ty == tl.int32
    b_out = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for i_tile in range(first, tl.minimum(first + TILES_A_SPLIT, tl.cdiv(K, 128))):
        b_words = tl.load(p_words + i_tile * N * 16)
        b_factors = _load_factors(factors, i_tile, N, o_row, GROUP)
        b_x = load_rows(p_x, i_tile * 128 + o_k, o_m, M, K, IS_WHOLE)
        b_weights = _weights(b_words, b_factors, HAS_OFFSETS, x.dtype.element_ty, IS_INTERPRETED)
        b_out = tl.dot(b_weights, b_x.T, b_out)
        if not IS_INTERPRETED:
            # The products have to be done here: where they are left in flight over the loop's end with operands in
            # registers, PTX's compiler waits for each of them.
            b_out = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [b_out], tl.float32, is_pure=True, pack=1)
    store_sum(b_out, out, parts, counters, tl.program_id(0), i_split, M, N, o_m, o_n, SPLITS)


@triton.jit
def _dequantize_kernel(
    words,
    factors,
    out,
    N,
    K,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    i_tile = tl.program_id(1)
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = i_tile * 128 + tl.arange(0, 128)
    o_row = tl.minimum(o_n, N - 1)
    b_words = tl.load(words + (i_tile * N + o_row[:, None]) * 16 + tl.arange(0, 16)[None, :])
    b_factors = _load_factors(factors, i_tile, N, o_row, GROUP)
    HAS_OFFSETS: tl.constexpr = factors.dtype.element_ty == tl.int32
    b_weights = _weights(b_words, b_factors, HAS_OFFSETS, out.dtype.element_ty, IS_INTERPRETED)
    p_out = out + o_n[:, None].to(tl.int64) * K + o_k[None, :]
    tl.store(p_out, b_weights, mask=(o_n < N)[:, None] & (o_k < K)[None, :])


def int4_matmul(x: torch.Tensor, words: torch.Tensor, factors: torch.Tensor, group_size: int) -> torch.Tensor:
    """x `[M, K]`, bfloat16 or float16, times a matrix `[N, K]` -> `[M, N]` in x's dtype, summed in float32.

    `words` are `tile_int4` of its numbers, `factors` those of `pack_factors` in x's dtype. A weight is
    `(number - 8) * scale + offset`, rounded. Groups are of 32 or 64 columns, or of a multiple of 128.
    """
    num_rows, k = x.shape
    n = words.shape[1]
    assert x.stride(1) == 1, "the values of a row lie side by side"
    assert takes_groups(group_size), group_size
    out = torch.empty((num_rows, n), dtype=x.dtype, device=x.device)
    if not num_rows:
        return out
    chosen = tiling(num_rows, n, k)
    grid = (triton.cdiv(n, chosen.block_n) * triton.cdiv(num_rows, chosen.block_m), chosen.num_splits)
    _int4_matmul_kernel[grid](
        x,
        words,
        factors,
        out,
        parts_of(out, chosen.num_splits),
        counters(x.device),
        num_rows,
        n,
        k,
        x.stride(0),
        triton.cdiv(triton.cdiv(k, TILE_COLUMNS), chosen.num_splits),
        GROUP=group_size,
        IS_WHOLE=k % TILE_COLUMNS == 0,
        BLOCK_N=chosen.block_n,
        BLOCK_M=chosen.block_m,
        SPLITS=chosen.num_splits,
        IS_INTERPRETED=triton.knobs.runtime.interpret,
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
    )
    return out


def dequantize_int4(
    words: torch.Tensor, factors: torch.Tensor, group_size: int, num_columns: int, dtype: torch.dtype
) -> torch.Tensor:
    """The matrix `[N, K]` of `int4_matmul` in `dtype`, which is that of the factors."""
    num_tiles, n, _ = words.shape
    out = torch.empty((n, num_columns), dtype=dtype, device=words.device)
    _dequantize_kernel[(triton.cdiv(n, 64), num_tiles)](
        words,
        factors,
        out,
        n,
        num_columns,
        GROUP=group_size,
        BLOCK_N=64,
        IS_INTERPRETED=triton.knobs.runtime.interpret,
    )
    return out
