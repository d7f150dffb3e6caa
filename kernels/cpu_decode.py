"""Paged attention of single queries on a CPU in bfloat16, compiled: K and V are read where they lie.

Scores, probabilities and sums are float32. Shapes as in `reference`.
"""

from functools import cache
from typing import Any

import torch

from mmserve.kernels import simd
from mmserve.kernels.jit import Kernel, float_bits
from mmserve.kernels.openmp import scratch, share_of, thread_number


def paged_attention_decode(
    q: torch.Tensor, kv_cache: torch.Tensor, block_tables: torch.Tensor, context_lens: torch.Tensor, scale: float
) -> torch.Tensor:
    """One query a sequence, `[S, H, D]`, over the `context_lens` `[S]` of its `block_tables` `[S, max_blocks]`.

    D is a multiple of 16, the heads of a query lie side by side, lengths and tables are int64.
    """
    num_sequences, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_cache.shape[2:4]
    out = q.new_empty(q.shape)
    threads, max_blocks = torch.get_num_threads(), block_tables.shape[1]
    scores_row = -(-max_blocks * block_size // simd.LANES) * simd.LANES
    _kernel(head_dim // simd.LANES)(
        threads,
        q,
        2 * q.stride(0),
        kv_cache,
        block_tables,
        context_lens,
        out,
        scratch(threads * scores_row),
        4 * scores_row,
        num_sequences,
        num_heads,
        num_kv_heads,
        block_size,
        max_blocks,
        float_bits(scale),
    )
    return out


@cache
def _kernel(num_vectors: int) -> Kernel:
    head_bytes = 2 * simd.LANES * num_vectors

    def kernel(arguments: Any) -> None:
        q, q_row, kv_cache, tables, lengths, out, scratch_at, scores_bytes = simd.unpack(arguments, 0, 8)
        num_sequences, num_heads, num_kv_heads, block_size, max_blocks, scale_bits = simd.unpack(arguments, 8, 14)
        scores = scratch_at + thread_number() * scores_bytes
        scale, heads_bytes = simd.float_of_bits(scale_bits), block_size * head_bytes
        group = num_heads // num_kv_heads
        first, last = share_of(num_sequences * num_heads)
        for unit in range(first, last):
            sequence, head = unit // num_heads, unit % num_heads
            length = simd.load_int64(lengths + 8 * sequence)
            table = tables + 8 * max_blocks * sequence
            of_head = kv_cache + head // group * heads_bytes
            query = simd.load_many_bfloats(q + sequence * q_row + head * head_bytes, num_vectors)
            highest, position = -simd.infinity(), 0
            while position < length:
                key = of_head + simd.load_int64(table + 8 * (position // block_size)) * 2 * num_kv_heads * heads_bytes
                for i in range(position, min(position + block_size, length)):
                    score = simd.dot(query, key) * scale
                    simd.store_float(scores + 4 * i, score)
                    highest = max(highest, score)
                    key += head_bytes
                position += block_size
            for i in range(length, -(-length // simd.LANES) * simd.LANES):
                simd.store_float(scores + 4 * i, -simd.infinity())
            sums, shift = simd.zeros(), simd.splat(-highest)
            for at in range(scores, scores + 4 * length, 4 * simd.LANES):
                weights = simd.exp(simd.add(simd.load_floats(at), shift))
                simd.store_floats(at, weights)
                sums = simd.add(sums, weights)
            mixed, position = simd.many_zeros(num_vectors), 0
            of_head += num_kv_heads * heads_bytes
            while position < length:
                value = of_head + simd.load_int64(table + 8 * (position // block_size)) * 2 * num_kv_heads * heads_bytes
                for i in range(position, min(position + block_size, length)):
                    mixed = simd.accumulate(mixed, simd.load_float(scores + 4 * i), value)
                    value += head_bytes
                position += block_size
            share = simd.inverse(simd.total(sums)) if length else simd.float_of_bits(0)
            simd.store_scaled(mixed, share, out + unit * head_bytes)

    return Kernel(kernel, num_vectors)
