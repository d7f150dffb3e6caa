"""Compiles the kernels of quantized products for cards that need not be there: a program of its own.

Where tests run, Triton's interpreter has taken the compiler's place. Prints a line for each kernel.
"""

from collections.abc import Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mmserve.kernels import eight_bit_matmul, int4_matmul

# Ampere, Ada and Hopper, by compute capability; FP8 is multiplied from Ada on.
CARDS = (80, 89, 90)
FIRST_WITH_FP8 = 89
NUMBERS = ("M", "N", "K")
ALIGNED = ("N", "K", "x_stride")


def compile_for(card: int, kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], tiling: Any) -> None:
    names = [*types, *constants]
    signature = {**types, **dict.fromkeys(constants, "constexpr")}
    is_aligned = [types.get(name, "").startswith("*") or name in ALIGNED for name in names]
    source = ASTSource(
        kernel,
        signature,
        constexprs=dict(constants),
        attrs={(i,): [["tt.divisibility", 16]] for i, aligned in enumerate(is_aligned) if aligned},
    )
    options = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", card, 32), options=options)
    assert compiled.asm["cubin"]
    print(card, kernel.__name__, types["x"], tiling)


def int4(card: int, dtype: str, num_rows: int) -> None:
    tiling = int4_matmul.tiling(num_rows, 4096, 4096)
    types = {"x": f"*{dtype}", "words": "*i32", "factors": "*i32", "out": f"*{dtype}", "parts": "*fp32"}
    types |= {"counters": "*i32", **dict.fromkeys((*NUMBERS, "x_stride", "TILES_A_SPLIT"), "i32")}
    constants = {"GROUP": 128, "IS_WHOLE": True, "BLOCK_N": tiling.block_n, "BLOCK_M": tiling.block_m}
    constants |= {"SPLITS": tiling.num_splits, "IS_INTERPRETED": False}
    compile_for(card, int4_matmul._int4_matmul_kernel, types, constants, tiling)


def eight_bits(card: int, dtype: str, num_rows: int, rows_a_scale: int | None) -> None:
    tiling = eight_bit_matmul.tiling(num_rows, 4096, 4096, has_blocks=rows_a_scale is not None)
    types = {"x": f"*{dtype}", "x_scales": "*fp32", "numbers": f"*{dtype}", "scales": "*fp32", "out": "*bf16"}
    types |= {"parts": "*fp32", "counters": "*i32", **dict.fromkeys((*NUMBERS, "BLOCKS_A_SPLIT"), "i32")}
    constants: dict[str, Any] = {"ROWS_A_SCALE": rows_a_scale, "IS_WHOLE": True, "BLOCK_N": tiling.block_n}
    constants |= {"BLOCK_M": tiling.block_m, "BLOCK_K": tiling.block_k, "SPLITS": tiling.num_splits}
    compile_for(card, eight_bit_matmul._eight_bit_matmul_kernel, types, constants, tiling)


if __name__ == "__main__":
    for card in CARDS:
        int4(card, "bf16", 1)
        int4(card, "fp16", 256)
        eight_bits(card, "i8", 1, None)
        if card >= FIRST_WITH_FP8:
            eight_bits(card, "fp8e4nv", 64, None)
            eight_bits(card, "fp8e4nv", 128, 128)
