"""Runs one small case of each of Triton's kernels on a card, and compares it with its twin: a program to be watched.

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/kernels/memcheck.py

Every tensor is an allocation of its own, so that what a kernel reads or writes beside it is seen. Exits with 1 where a
kernel and its twin differ, with 2 where there is no card.
"""

import itertools
import os
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import torch
from kernel_checks import DEVICE, randn, relative_error

from mmserve.kernels import reference, reference_quant

# The interpreter multiplies no bfloat16.
DTYPE, TOLERANCE = (torch.bfloat16, 1e-2) if DEVICE.type == "cuda" else (torch.float32, 1e-4)
BLOCK_SIZE, NUM_KV_HEADS, GROUP, SCALE = 16, 2, 3, 0.11
NUM_TOKENS = 67
# Padded to a power of two, and not.
HEAD_DIMS = (80, 128)

# What a kernel gives, and what its twin gives in float32.
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


class Pages(NamedTuple):
    kv_cache: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor


def int32(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def pages(context_lens: list[int], head_dim: int, num_shared: int = 0) -> Pages:
    """Tables of blocks in any order, but for the first, which all have in common; a cache of no more blocks than that.

    The last token's place is the last of the cache.
    """
    counts = [-(-length // BLOCK_SIZE) - num_shared for length in context_lens]
    num_blocks = num_shared + sum(counts)
    free = [*torch.randperm(num_blocks - 1).tolist(), num_blocks - 1]
    shared, free = free[:num_shared], free[num_shared:]
    ends = list(itertools.accumulate(counts))
    tables = [shared + free[end - count : end] for end, count in zip(ends, counts, strict=True)]
    width = max(map(len, tables))
    kv_cache = randn(num_blocks, 2, NUM_KV_HEADS, BLOCK_SIZE, head_dim, dtype=DTYPE)
    return Pages(kv_cache, int32([table + [0] * (width - len(table)) for table in tables]), int32(context_lens))


def decode(head_dim: int, num_shared: int | None) -> Pairs:
    """Contexts of which the first are split."""
    from mmserve.kernels.paged_decode import paged_attention_decode

    cache, tables, lengths = pages([400, 97, 48, 96], head_dim, num_shared or 0)
    q = randn(len(lengths), NUM_KV_HEADS * GROUP, head_dim, dtype=DTYPE)
    shared = None if num_shared is None else int32([num_shared])
    out, expected = (
        attend(x, kv, tables, lengths, SCALE, num_shared_blocks=shared, max_context_len=400)
        for attend, x, kv in (
            (paged_attention_decode, q, cache),
            (reference.paged_attention_decode, q.float(), cache.float()),
        )
    )
    return [(out, expected)]


def chunk(head_dim: int) -> Pairs:
    from mmserve.kernels.paged_chunk import paged_attention_chunk, query_tiles

    query_lens, (cache, tables, lengths) = [1, 65, 128], pages([33, 65, 192], head_dim)
    q = randn(sum(query_lens), NUM_KV_HEADS * GROUP, head_dim, dtype=DTYPE)
    rest = (
        tables,
        int32([0, *itertools.accumulate(query_lens)]),
        lengths,
        torch.from_numpy(query_tiles(query_lens)).to(DEVICE),
        SCALE,
    )
    return [
        (
            paged_attention_chunk(q, cache, *rest),
            reference.paged_attention_chunk(q.float(), cache.float(), *rest),
        )
    ]


def slots(num_slots: int) -> torch.Tensor:
    """The last slot is one of them; a token in ten has none."""
    chosen = torch.randperm(num_slots)[:NUM_TOKENS]
    chosen[0] = num_slots - 1 if num_slots - 1 not in chosen else chosen[0]
    chosen[5::10] = -1
    return chosen.to(DEVICE)


def angles(head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin `[T, 1, D]` as the rotary table gives them."""
    turns = randn(NUM_TOKENS, 1, head_dim // 2)
    return torch.cat((turns.cos(), turns.cos()), -1), torch.cat((-turns.sin(), turns.sin()), -1)


def rotate(head_dim: int, *, normed: bool) -> Pairs:
    from mmserve.kernels.kv_store import rotate_and_store

    num_heads, names = NUM_KV_HEADS * GROUP, ("q_weight", "k_weight") if normed else ()
    qkv = randn(NUM_TOKENS, num_heads + 2 * NUM_KV_HEADS, head_dim, dtype=DTYPE)
    cos, sin = (x.to(DTYPE) for x in angles(head_dim))
    weights: dict[str, Any] = {name: randn(head_dim, dtype=DTYPE) for name in names}
    places, caches = slots(8 * BLOCK_SIZE), torch.zeros(2, 8, 2, NUM_KV_HEADS, BLOCK_SIZE, head_dim, device=DEVICE)
    ours, theirs = caches[0].to(DTYPE), caches[1]
    q = rotate_and_store(qkv, cos, sin, ours, places, num_heads, eps=1e-6, **weights)
    wide: dict[str, Any] = {name: weight.float() for name, weight in weights.items()}
    expected = reference.rotate_and_store(
        qkv.float(), cos.float(), sin.float(), theirs, places, num_heads, eps=1e-6, **wide
    )
    return [(q, expected), (ours, theirs)]


def norms(module: ModuleType, name: str, num_vectors: int) -> Pairs:
    """A norm with weight (and bias), alone and after a sum, of few and of many values a row."""
    pairs: Pairs = []
    for size in (200, 4096):
        x, residual = (randn(NUM_TOKENS, size, dtype=DTYPE) for _ in range(2))
        vectors = [randn(size, dtype=DTYPE) for _ in range(num_vectors)]
        wide = [vector.float() for vector in vectors]
        alone, after_sum = getattr(module, name), getattr(module, f"add_{name}")
        pairs.append((alone(x, *vectors, 1e-6), getattr(reference, name)(x.float(), *wide, 1e-6)))
        ours, total = after_sum(x, residual, *vectors, 1e-6)
        theirs, expected_total = getattr(reference, f"add_{name}")(x.float(), residual.float(), *wide, 1e-6)
        pairs += [(ours, theirs), (total, expected_total)]
    return pairs


def rms_norm() -> Pairs:
    from mmserve.kernels import rms_norm as module

    return norms(module, "rms_norm", 1)


def layer_norm() -> Pairs:
    from mmserve.kernels import layer_norm as module

    return norms(module, "layer_norm", 2)


def rotary(head_dim: int) -> Pairs:
    from mmserve.kernels.rotary import apply_rotary

    x = randn(NUM_TOKENS, 5, head_dim, dtype=DTYPE)
    cos, sin = angles(head_dim)
    return [(apply_rotary(x, cos, sin), reference.apply_rotary(x.float(), cos, sin))]


def silu_and_mul() -> Pairs:
    from mmserve.kernels.silu_and_mul import silu_and_mul as kernel

    x = randn(NUM_TOKENS, 2 * 1100, dtype=DTYPE)
    return [(kernel(x), reference.silu_and_mul(x.float()))]


def varlen(head_dim: int, lengths: list[int]) -> Pairs:
    from mmserve.kernels.varlen import query_tile, query_tiles, varlen_attention

    q, k, v = (randn(sum(lengths), 2, head_dim, dtype=DTYPE) for _ in range(3))
    starts, rows = int32([0, *itertools.accumulate(lengths)]), query_tile(lengths)
    tiles = query_tiles(lengths, rows).to(DEVICE)
    out, expected = (
        attend(*tensors, starts, tiles, SCALE, query_tile=rows)
        for attend, tensors in (
            (varlen_attention, (q, k, v)),
            (reference.varlen_attention, (q.float(), k.float(), v.float())),
        )
    )
    return [(out, expected)]


def argmax() -> Pairs:
    from mmserve.kernels.sampling import argmax as kernel

    logits = randn(5, 9001, dtype=DTYPE)
    return [(kernel(logits), reference.argmax(logits))]


def sample() -> Pairs:
    """Rows that are greedy, random, and with each of the filters."""
    from mmserve.kernels.sampling import sample as kernel

    logits = 4 * randn(5, 9001, dtype=DTYPE)
    temperature, top_p, min_p, uniform = (
        torch.tensor(values, device=DEVICE)
        for values in ([0.0, 0.5, 1.0, 0.7, 0.9], [1.0, 1.0, 1.0, 0.4, 0.8], [0.0, 0.0, 0.3, 0.0, 0.1], [0.3] * 5)
    )
    columns = (temperature, int32([9001, 9001, 20, 9001, 30]), top_p, min_p, uniform)
    return [(kernel(logits, *columns), reference.sample(logits, *columns))]


def resample() -> Pairs:
    from mmserve.kernels.resample import resample as kernel

    image = torch.randint(0, 256, (3, 40, 33), dtype=torch.uint8, device=DEVICE)
    starts, weights = (torch.arange(21, device=DEVICE) * 2).int(), int32([[1 << 20] * 21] * 4)
    return [(kernel(image, starts, weights, 22), reference.resample(image, starts, weights, 22))]


def int4_matmul() -> Pairs:
    """One row, a few and many; pieces of K, and a last tile that reaches beyond the last column."""
    from mmserve.kernels import int4_matmul as kernels

    dtype = DTYPE if DEVICE.type == "cuda" else torch.float16
    words = kernels.tile_int4(torch.randint(0, 16, (70, 608), device=DEVICE, dtype=torch.uint8))
    scales, offsets = torch.rand(19, 70, device=DEVICE).to(dtype), randn(19, 70, dtype=dtype)
    pairs = []
    for factors in (kernels.pack_factors(scales, given, 32) for given in (offsets, None)):
        weights, expected = (
            unpack(words, factors, 32, 608, dtype)
            for unpack in (kernels.dequantize_int4, reference_quant.dequantize_int4)
        )
        pairs.append((weights, expected))
        for x in (randn(num_rows, 608, dtype=dtype) for num_rows in (1, 5, 70)):
            pairs.append(
                (kernels.int4_matmul(x, words, factors, 32), reference_quant.int4_matmul(x, words, factors, 32))
            )
    return pairs


def quantize_rows() -> Pairs:
    """By their scales: the interpreter cuts numbers off where a card rounds."""
    from mmserve.kernels.quantize_rows import quantize_rows as kernel

    x = randn(5, 100, dtype=DTYPE)
    return [
        (kernel(x, dtype)[1], reference_quant.quantize_rows(x, dtype)[1]) for dtype in (torch.float8_e4m3fn, torch.int8)
    ]


def eight_bit_matmul() -> Pairs:
    """Pieces of K, the last of which is not whole."""
    from mmserve.kernels.eight_bit_matmul import eight_bit_matmul as kernel

    scales = 0.01 + torch.rand(5, 1, device=DEVICE), 0.01 + torch.rand(70, device=DEVICE)
    pairs = []
    for dtype in (torch.float8_e4m3fn, torch.int8):
        x, numbers = ((20 * randn(num_rows, 1040)).to(dtype) for num_rows in (5, 70))
        expected = reference_quant.eight_bit_matmul(x, scales[0], numbers, scales[1], torch.float32)
        pairs.append((kernel(x, scales[0], numbers, scales[1], DTYPE), expected))
    return pairs


def fp8_block_matmul() -> Pairs:
    from mmserve.kernels.eight_bit_matmul import fp8_block_matmul as kernel

    numbers, scales = (20 * randn(200, 384)).to(torch.float8_e4m3fn), 0.01 + torch.rand(2, 3, device=DEVICE)
    # Rows that FP8 has exactly.
    x = (20 * randn(17, 384)).to(torch.float8_e4m3fn).float()
    x[:, ::128] = 448.0
    return [(kernel(x.to(DTYPE), numbers, scales, 128), reference_quant.fp8_block_matmul(x, numbers, scales, 128))]


# By the module of the kernel.
CASES: Mapping[str, Callable[[], Pairs]] = {
    "kv_store": lambda: [pair for head_dim in HEAD_DIMS for pair in rotate(head_dim, normed=False)],
    "kv_store, normed": lambda: [pair for head_dim in HEAD_DIMS for pair in rotate(head_dim, normed=True)],
    "paged_chunk": lambda: [pair for head_dim in HEAD_DIMS for pair in chunk(head_dim)],
    "paged_decode": lambda: [pair for head_dim in HEAD_DIMS for pair in decode(head_dim, None)],
    "paged_decode, shared": lambda: [
        pair for head_dim in HEAD_DIMS for num_shared in (0, 2) for pair in decode(head_dim, num_shared)
    ],
    "rms_norm": rms_norm,
    "layer_norm": layer_norm,
    "rotary": lambda: [pair for head_dim in HEAD_DIMS for pair in rotary(head_dim)],
    "silu_and_mul": silu_and_mul,
    "varlen, windows": lambda: [pair for head_dim in HEAD_DIMS for pair in varlen(head_dim, [64, 64, 16, 3])],
    "varlen, images": lambda: [pair for head_dim in HEAD_DIMS for pair in varlen(head_dim, [1, 200, 129])],
    "sampling, argmax": argmax,
    "sampling, sample": sample,
    "resample": resample,
    "int4_matmul": int4_matmul,
    "quantize_rows": quantize_rows,
    "eight_bit_matmul": eight_bit_matmul,
    "eight_bit_matmul, blocks": fp8_block_matmul,
}


def worst_error(case: Callable[[], Pairs]) -> float:
    """Of what a case compares."""
    torch.manual_seed(0)
    return max(relative_error(ours, theirs) for ours, theirs in case())


def check(cases: Mapping[str, Callable[[], Pairs]]) -> list[str]:
    """The names of those that differ from their twins; says how far each is off."""
    errors = {}
    for name, case in cases.items():
        errors[name] = worst_error(case)
        print(f"{name}: {errors[name]:.1e}", flush=True)
    return [name for name, error in errors.items() if not error < TOLERANCE]


def main() -> int:
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    if DEVICE.type != "cuda":
        print("needs a CUDA device", file=sys.stderr)
        return 2
    differing = check(CASES)
    torch.cuda.synchronize()
    print(f"differ: {', '.join(differing)}" if differing else "all kernels equal their twins")
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())
