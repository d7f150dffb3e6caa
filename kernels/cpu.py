"""Paged attention as a CPU runs it, with PyTorch's own products: what is the same in every layer is computed once.

Shapes: T tokens of a step, H query heads, KV key/value heads, D head size, L context length. A layer's paged cache is
`[num_blocks, 2, KV, block_size, D]`, K before V; a slot is `block_id * block_size + offset`.
"""

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

IntArray = npt.NDArray[np.int64]


# In an E4M3 number moved to the top of a bfloat16's exponent and mantissa, the exponent is this factor too small.
_FP8_IN_BFLOAT16 = 2.0**120
_FP8_MAX = 448.0
_SIGN_AND_FP8 = 0x87F0 - (1 << 16)


def widen(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """FP8 (E4M3, finite) or int8 numbers in `dtype`. PyTorch's own conversion of FP8 to bfloat16 takes 3 to 5 times as
    long.
    """
    if numbers.dtype is not torch.float8_e4m3fn or dtype is not torch.bfloat16 or numbers.device.type != "cpu":
        return numbers.to(dtype)
    bits = numbers.view(torch.int8).to(torch.int16)
    bits.bitwise_left_shift_(4).bitwise_and_(_SIGN_AND_FP8)
    return bits.view(torch.bfloat16).mul_(_FP8_IN_BFLOAT16)


def store_rows(slot_mapping: IntArray, num_kv_heads: int, block_size: int) -> torch.Tensor:
    """Slots `[T]` -> where `store_kv` writes, `[T * 2 * KV]`: the same in every layer of a step."""
    blocks, offsets = np.divmod(slot_mapping, block_size)
    rows = (blocks[:, None] * 2 * num_kv_heads + np.arange(2 * num_kv_heads)) * block_size + offsets[:, None]
    return torch.from_numpy(rows.ravel())


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """`reference.apply_rotary` in place."""
    turned = torch.roll(x, x.shape[-1] // 2, dims=-1)
    x.mul_(cos).addcmul_(turned, sin)


def store_kv(
    kv: torch.Tensor, kv_cache: torch.Tensor, rows: torch.Tensor, k_scale: float = 1.0, v_scale: float = 1.0
) -> None:
    """Write the heads of K and after them those of V, `[T, 2 * KV, D]`, to the `store_rows` of the paged cache.

    A cache in FP8 holds k and v over their scales, cut off at the end of the range.
    """
    head_dim = kv_cache.shape[-1]
    if kv_cache.dtype is torch.float8_e4m3fn:
        scaled = torch.cat([x / scale for x, scale in zip(kv.chunk(2, dim=1), (k_scale, v_scale), strict=True)], dim=1)
        kv = scaled.clamp_(-_FP8_MAX, _FP8_MAX).to(kv_cache.dtype).view(torch.uint8)
        kv_cache = kv_cache.view(torch.uint8)
    kv_cache.view(-1, head_dim).index_copy_(0, rows, kv.reshape(-1, head_dim))


def gather_rows(block_ids: IntArray, num_kv_heads: int) -> torch.Tensor:
    """Block tables `[B, num_blocks]` -> what `gather_kv` reads, `[2, B, KV, num_blocks]`: the same in every layer."""
    heads = np.arange(2 * num_kv_heads).reshape(2, 1, num_kv_heads, 1)
    return torch.from_numpy(block_ids[None, :, None] * (2 * num_kv_heads) + heads)


def gather_kv(kv_cache: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V in `dtype`, contiguous `[B, KV, L, D]` each, at `gather_rows`."""
    block_size, head_dim = kv_cache.shape[-2:]
    stored = kv_cache.view(torch.uint8) if kv_cache.dtype is torch.float8_e4m3fn else kv_cache
    gathered = stored.view(-1, block_size * head_dim).index_select(0, rows.flatten())
    if kv_cache.dtype is not dtype:
        gathered = widen(gathered.view(kv_cache.dtype), dtype)
    k, v = gathered.view(*rows.shape[:3], -1, head_dim).unbind()
    return k, v


# From so many keys on, over all sequences, plain products beat the fused attention: 1 x 288 keys took 53 and 26 us,
# 16 x 288 160 and 243, 1 x 8,192 210 and 509 (bf16, 3 KV heads of 64, 2 cores of an EPYC 9005).
_MIN_KEYS_FOR_PRODUCTS = 1024


def paged_attention_decode(
    q: torch.Tensor, kv_cache: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """One query a sequence, `[B, H, D]`, over its paged context; mask `[B, 1, 1, L]` is added to the scores."""
    k, v = gather_kv(kv_cache, rows, q.dtype)
    num_sequences, num_kv_heads, length, head_dim = k.shape
    grouped = q.view(num_sequences, num_kv_heads, -1, head_dim)
    if num_sequences * length < _MIN_KEYS_FOR_PRODUCTS:
        attended = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
        return attended.reshape(q.shape)
    scores = torch.bmm((grouped * scale).flatten(0, 1), k.flatten(0, 1).transpose(1, 2))
    scores.view(num_sequences, num_kv_heads, *scores.shape[1:]).add_(mask)
    return torch.bmm(torch.softmax(scores, dim=-1), v.flatten(0, 1)).view(q.shape)


# Queries that share one product. For 256, 512 and 2,048 tokens 64 took 0.50, 1.36 and 15.3 ms, 128 0.43, 1.18 and 13.7,
# 256 1.4, 3.4 and 22.9, the fused attention 0.96, 3.7 and 36.4 (bf16, 9 heads of 64, 2 cores of an EPYC 9005).
_TILE = 128


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """The last tokens of one sequence, q `[T, H, D]`, attend to themselves and all before: k and v `[KV, L, D]`."""
    num_kv_heads, context_len, head_dim = k.shape
    first, out = context_len - q.shape[0], torch.empty_like(q)
    grouped = (q * scale).view(q.shape[0], num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    for start in range(0, q.shape[0], _TILE):
        tile = grouped[:, :, start : start + _TILE]
        num_groups, length = tile.shape[1:3]
        end = first + start + length
        scores = torch.bmm(tile.reshape(num_kv_heads, -1, head_dim), k[:, :end].transpose(1, 2))
        future = torch.full((length, length), -torch.inf, dtype=q.dtype, device=q.device).triu_(1)
        scores.view(num_kv_heads, num_groups, length, end)[..., end - length :].add_(future)
        values = torch.bmm(torch.softmax(scores, dim=-1), v[:, :end])
        out[start : start + length] = values.view(num_kv_heads * num_groups, length, head_dim).transpose(0, 1)
    return out


def paged_attention_chunk(
    q: torch.Tensor, kv_cache: torch.Tensor, rows: torch.Tensor, context_len: int, scale: float
) -> torch.Tensor:
    """A chunk of one sequence, q `[T, H, D]`, over its paged context of `context_len` tokens, its own among them."""
    k, v = gather_kv(kv_cache, rows, q.dtype)
    return causal_attention(q, k[0, :, :context_len], v[0, :, :context_len], scale)


# Torch compiles its fused attention in bfloat16 for every length and keeps that for ever: 142 MiB for 300 lengths of 4
# heads of 64, 8 MiB if lengths are multiples of 64. The padding takes up to a tenth more time.
_LENGTH_STEP = 64


def varlen_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int], scale: float
) -> torch.Tensor:
    """Each sequence of a packed batch attends to the whole of itself: q, k, v `[T, H, D]`; `lengths` add up to T.

    Neighbours of equal length run as one batch, so order by length what may be ordered.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    start = 0
    for length, run in groupby(lengths):
        count = sum(1 for _ in run)
        rows = slice(start, start + count * length)
        batch_q, batch_k, batch_v = (x[rows].view(count, length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        out[rows] = _attend(batch_q, batch_k, batch_v, scale).transpose(1, 2).flatten(0, 1)
        start = rows.stop
    return out


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """q, k, v `[N, H, L, D]` -> `[N, H, L, D]`, padded where torch would keep what it compiles for each length."""
    length = q.shape[2]
    num_missing = -length % _LENGTH_STEP
    if q.dtype is not torch.bfloat16 or length < _LENGTH_STEP or num_missing == 0:
        return F.scaled_dot_product_attention(q, k, v, scale=scale)
    q, k, v = (F.pad(x, (0, 0, 0, num_missing)) for x in (q, k, v))
    mask = torch.zeros(length + num_missing, dtype=q.dtype)
    mask[length:] = float("-inf")
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.expand(len(mask), -1), scale=scale)
    return attended[:, :, :length]
