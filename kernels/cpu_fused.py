"""The small kernels of a CPU in bfloat16, compiled; what they are not for is left to `reference`.

Shapes as there. Sums, norms and rotations are computed in float32.
"""

from functools import cache
from typing import Any

import torch
from numba.extending import register_jitable

from mmserve.kernels import reference, simd
from mmserve.kernels.jit import Kernel, float_bits
from mmserve.kernels.openmp import share_of
from mmserve.kernels.reference import add_layer_norm, apply_rotary, layer_norm

__all__ = [
    "add",
    "add_layer_norm",
    "add_rms_norm",
    "apply_rotary",
    "layer_norm",
    "rms_norm",
    "rotate_and_store",
    "silu_and_mul",
]

# Fewer numbers than this are done by one thread: to hand work to another takes as long.
_MIN_NUMBERS_FOR_THREADS = 1 << 14
_VECTOR = simd.VECTOR_BYTES


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if not _takes(x, weight):
        return reference.rms_norm(x, weight, eps)
    out = torch.empty_like(x)
    size = weight.shape[0]
    num_threads = _num_threads(x)
    _norm_kernel()(num_threads, x, 0, weight, out, 0, x.numel() // size, size, float_bits(eps))
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if not (_takes(x, weight) and _takes(residual, weight)):
        return reference.add_rms_norm(x, residual, weight, eps)
    out, total = torch.empty_like(x), torch.empty_like(x)
    size = weight.shape[0]
    _norm_kernel()(
        _num_threads(x),
        x,
        residual,
        weight,
        out,
        total,
        x.numel() // size,
        size,
        float_bits(eps),
    )
    return out, total


def add(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    if not (_takes(x) and _takes(residual)) or x.numel() % simd.LANES:
        return reference.add(x, residual)
    out = torch.empty_like(x)
    _add_kernel()(_num_threads(x), x, residual, out, x.numel() // simd.LANES)
    return out


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    num_rows, size = x.shape[0], x.shape[1] // 2
    if not _takes(x) or size % simd.LANES:
        return reference.silu_and_mul(x)
    out = x.new_empty(num_rows, size)
    _silu_kernel()(_num_threads(x), x, out, num_rows, size)
    return out


def rotate_and_store(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    num_heads: int,
    *,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """As in `reference`, except that q and k are changed in place, and that the cache has no scales.

    All is bfloat16 and contiguous, D is a multiple of 32, slots are int64 and none is negative.
    """
    num_tokens, _, head_dim = qkv.shape
    num_kv_heads, block_size = kv_cache.shape[2:4]
    _rotary_kernel()(
        _num_threads(qkv),
        qkv,
        cos,
        sin,
        kv_cache,
        slot_mapping,
        num_tokens,
        num_heads,
        num_kv_heads,
        head_dim,
        block_size,
        *((0, 0) if q_weight is None or k_weight is None else (q_weight, k_weight)),
        float_bits(eps),
    )


def _takes(x: torch.Tensor, weight: torch.Tensor | None = None) -> bool:
    if weight is not None and not (_takes(weight) and len(weight) % simd.LANES == 0):
        return False
    return x.dtype is torch.bfloat16 and x.is_contiguous()


def _num_threads(x: torch.Tensor) -> int:
    return 1 if x.numel() < _MIN_NUMBERS_FOR_THREADS else torch.get_num_threads()


@register_jitable  # type: ignore[untyped-decorator]
def _inverse_norm(x: int, size: int, eps: float) -> Any:
    squares = simd.zeros()
    for i in range(0, 2 * size, _VECTOR):
        values = simd.load_bfloats(x + i)
        squares = simd.fma(values, values, squares)
    return simd.splat(simd.inverse_root(simd.total(squares) / size + eps))


@cache
def _norm_kernel() -> Kernel:
    def kernel(arguments: Any) -> None:
        x, residual, weight, out, sums, num_rows, size, eps = simd.unpack(arguments, 0, 8)
        first, last = share_of(num_rows)
        for at in range(2 * size * first, 2 * size * last, 2 * size):
            normed = x + at
            if residual != 0:
                normed = sums + at
                for i in range(at, at + 2 * size, _VECTOR):
                    simd.store_bfloats(sums + i, simd.add(simd.load_bfloats(x + i), simd.load_bfloats(residual + i)))
            factor = _inverse_norm(normed, size, simd.float_of_bits(eps))
            for i in range(0, 2 * size, _VECTOR):
                values = simd.multiply(simd.load_bfloats(normed + i), factor)
                simd.store_bfloats(out + at + i, simd.multiply(values, simd.load_bfloats(weight + i)))

    return Kernel(kernel)


@cache
def _add_kernel() -> Kernel:
    def kernel(arguments: Any) -> None:
        x, residual, out, num_vectors = simd.unpack(arguments, 0, 4)
        first, last = share_of(num_vectors)
        for i in range(first * _VECTOR, last * _VECTOR, _VECTOR):
            simd.store_bfloats(out + i, simd.add(simd.load_bfloats(x + i), simd.load_bfloats(residual + i)))

    return Kernel(kernel)


@cache
def _silu_kernel() -> Kernel:
    def kernel(arguments: Any) -> None:
        x, out, num_rows, size = simd.unpack(arguments, 0, 4)
        first, last = share_of(num_rows * size // simd.LANES)
        one, vectors_of_row = simd.splat(1.0), size // simd.LANES
        for vector in range(first, last):
            gate_at = x + _VECTOR * (vector + vector // vectors_of_row * vectors_of_row)
            gate, up = simd.load_bfloats(gate_at), simd.load_bfloats(gate_at + 2 * size)
            silu = simd.divide(gate, simd.add(one, simd.exp(simd.negative(gate))))
            simd.store_bfloats(out + _VECTOR * vector, simd.multiply(silu, up))

    return Kernel(kernel)


@register_jitable  # type: ignore[untyped-decorator]
def _rotate(head: int, cos: int, sin: int, head_dim: int, weight: int, eps: float) -> None:
    """Norm (with a weight) and rotate a head in place."""
    factor = simd.splat(1.0)
    if weight != 0:
        factor = _inverse_norm(head, head_dim, eps)
    for low in range(0, head_dim, _VECTOR):
        high = low + head_dim
        left, right = simd.load_bfloats(head + low), simd.load_bfloats(head + high)
        if weight != 0:
            left = simd.multiply(simd.multiply(left, factor), simd.load_bfloats(weight + low))
            right = simd.multiply(simd.multiply(right, factor), simd.load_bfloats(weight + high))
        turned = simd.multiply(right, simd.load_bfloats(sin + low))
        simd.store_bfloats(head + low, simd.fma(left, simd.load_bfloats(cos + low), turned))
        turned = simd.multiply(left, simd.load_bfloats(sin + high))
        simd.store_bfloats(head + high, simd.fma(right, simd.load_bfloats(cos + high), turned))


@cache
def _rotary_kernel() -> Kernel:
    def kernel(arguments: Any) -> None:
        qkv, cos, sin, kv_cache, slots, num_tokens = simd.unpack(arguments, 0, 6)
        num_heads, num_kv_heads, head_dim, block_size, q_weight, k_weight, eps_bits = simd.unpack(arguments, 6, 13)
        eps, head_bytes = simd.float_of_bits(eps_bits), 2 * head_dim
        first, last = share_of(num_tokens)
        for token in range(first, last):
            head = qkv + token * (num_heads + 2 * num_kv_heads) * head_bytes
            cos_at, sin_at = cos + token * head_bytes, sin + token * head_bytes
            for _ in range(num_heads):
                _rotate(head, cos_at, sin_at, head_dim, q_weight, eps)
                head += head_bytes
            slot = simd.load_int64(slots + 8 * token)
            block, offset = slot // block_size, slot % block_size
            stored = kv_cache + (block * 2 * num_kv_heads * block_size + offset) * head_bytes
            for i in range(2 * num_kv_heads):
                if i < num_kv_heads:
                    _rotate(head, cos_at, sin_at, head_dim, k_weight, eps)
                for at in range(0, head_bytes, _VECTOR):
                    simd.store_bfloats(stored + at, simd.load_bfloats(head + at))
                head += head_bytes
                stored += block_size * head_bytes

    return Kernel(kernel)
