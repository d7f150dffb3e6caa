"""The kernels in plain PyTorch: the twin, of the same signature, that every other implementation is tested against.

Shapes: T tokens of a step, H query heads, KV key/value heads, D head size, L context length. A layer's paged cache is
`[num_blocks, 2, KV, block_size, D]`, K before V; a slot is `block_id * block_size + offset`.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F

# Queries a tile of `paged_attention_chunk`.
QUERY_TILE = 64


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last axis (Zhang and Sennrich 2019)."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of x and residual, `[T, size]` each, normed; and the sum itself, in its dtype."""
    total = residual + x
    return rms_norm(total, weight, eps), total


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Layer norm over the last axis (Ba et al. 2016)."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of x and residual, `[T, size]` each, normed; and the sum itself, in its dtype."""
    total = residual + x
    return layer_norm(total, weight, bias, eps), total


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the halves of each head. x `[T, H, D]`; cos and sin `[T, 1, D]`, the first half of sin negated.

    Computed in the wider of the dtypes of x and cos, returned in the one of x.
    """
    rotated = (x * cos).addcmul_(torch.roll(x, x.shape[-1] // 2, dims=-1), sin)
    return rotated if rotated.dtype is x.dtype else rotated.to(x.dtype)


def add(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """The sum, of one dtype."""
    return residual + x


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` where x is gate and up side by side, `[T, 2 * I]` -> `[T, I]` (Shazeer 2020)."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def _store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: float,
    v_scale: float,
) -> None:
    """Write k and v, `[T, KV, D]`, to the slots `[T]` of the paged cache; a token of slot -1 is left out."""
    is_stored = slot_mapping >= 0
    blocks, offsets = slot_mapping[is_stored] // kv_cache.shape[3], slot_mapping[is_stored] % kv_cache.shape[3]
    if kv_cache.dtype is torch.float8_e4m3fn:
        k, v = ((x.float() / scale).clamp(-448.0, 448.0) for x, scale in ((k, k_scale), (v, v_scale)))
    kv_cache[blocks, 0, :, offsets] = k[is_stored].to(kv_cache.dtype)
    kv_cache[blocks, 1, :, offsets] = v[is_stored].to(kv_cache.dtype)


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
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """From qkv `[T, H + 2 * KV, D]`: q rotated, `[T, H, D]`; k rotated and v go to the slots `[T]` of the paged cache.

    With weights `[D]` the heads of q and k are normed before (Qwen3, Yang et al. 2025). A cache in FP8 holds k and v
    over their scales, cut off at the end of the range.
    """
    num_rotated = num_heads + kv_cache.shape[2]
    q, k, v = qkv[:, :num_heads], qkv[:, num_heads:num_rotated], qkv[:, num_rotated:]
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    _store_kv(apply_rotary(k, cos, sin), v, kv_cache, slot_mapping, k_scale, v_scale)
    return apply_rotary(q, cos, sin)


def paged_attention_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    *,
    num_shared_blocks: torch.Tensor | None = None,
    max_context_len: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """One query a sequence, `[S, H, D]`, over the `context_lens` `[S]` of its `block_tables` `[S, max_blocks]`.

    A context of 0 gives zeros. The first `num_shared_blocks` `[1]` of all tables are equal, and every context but an
    empty one is longer; none exceeds `max_context_len`. The result goes to `out` where that is given.
    """
    assert int(context_lens.max()) <= max_context_len, "a context is longer than was promised"
    if num_shared_blocks is not None:
        shared = block_tables[context_lens > 0, : int(num_shared_blocks)]
        assert bool((shared == shared[:1]).all()), "the tables begin with different blocks"
    out = torch.empty_like(q) if out is None else out
    for i, context_len in enumerate(context_lens.tolist()):
        k, v = _paged_context(kv_cache, block_tables[i], context_len)
        out[i] = _causal_attention(q[i : i + 1], k.to(q.dtype), v.to(q.dtype), scale)[0] if context_len else 0.0
    return out


def paged_attention_chunk(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    tiles: torch.Tensor,
    scale: float,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The last queries of each sequence, `[T, H, D]` packed at `query_starts` `[S + 1]`, attend to what precedes them.

    Query i of n, in a context of c tokens, sees the first c - n + i + 1. `tiles` `[N, 2]` (sequence, first query in it)
    cover all queries, `QUERY_TILE` each. The result goes to `out` where that is given.
    """
    out, starts = torch.empty_like(q) if out is None else out, query_starts.tolist()
    lengths = [stop - start for start, stop in pairwise(starts)]
    expected = {(i, first) for i, length in enumerate(lengths) for first in range(0, length, QUERY_TILE)}
    assert {(i, first) for i, first in tiles.tolist()} == expected, "the tiles do not cover the queries"
    for i, context_len in enumerate(context_lens.tolist()):
        rows = slice(starts[i], starts[i + 1])
        k, v = _paged_context(kv_cache, block_tables[i], context_len)
        out[rows] = _causal_attention(q[rows], k.to(q.dtype), v.to(q.dtype), scale)
    return out


def _paged_context(kv_cache: torch.Tensor, table: torch.Tensor, context_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `context_len` rows of K and of V, `[L, KV, D]`, in the blocks of a table."""
    block_size = kv_cache.shape[3]
    blocks = kv_cache[table[: -(-context_len // block_size)].long()]
    k, v = blocks.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :context_len]
    return k, v


def _causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """The last queries of a sequence, `[T, H, D]`, over k and v `[L, KV, D]`; a KV head serves neighbours."""
    group, first = q.shape[1] // k.shape[1], k.shape[0] - q.shape[0]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("thd,lhd->htl", q, k) * scale
    future = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(first + 1)
    return torch.einsum("htl,lhd->thd", torch.softmax(scores.masked_fill(future, -torch.inf), dim=-1), v)


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    tiles: torch.Tensor,
    scale: float,
    *,
    query_tile: int,
) -> torch.Tensor:
    """Each sequence of a packed batch attends to the whole of itself: q, k, v `[T, H, D]`.

    `starts` int32 `[S + 1]` bounds the sequences; `tiles` int32 `[N, 2]` are all the pieces of `query_tile` rows, as
    (sequence, first row inside the sequence).
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    bounds = starts.tolist()
    for sequence, first in tiles.tolist():
        start, end = bounds[sequence], bounds[sequence + 1]
        rows = slice(start + first, min(start + first + query_tile, end))
        scores = torch.einsum("qhd,khd->hqk", q[rows].float(), k[start:end].float()) * scale
        attended = torch.einsum("hqk,khd->qhd", torch.softmax(scores, dim=-1), v[start:end].float())
        out[rows] = attended.to(q.dtype)
    return out


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """The first of the greatest logits of each row, `[N, V]` -> int64 `[N]`; NaN counts as minus infinity."""
    return logits.float().nan_to_num(nan=-torch.inf).argmax(dim=-1)


# A token that is e^-87 times as likely as the best (the least normal float32) is not drawn.
_MAX_LOG_RATIO = 87.0


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    """Token ids, int64 `[N]`, drawn from logits `[N, V]` of any float dtype; the rest is `[N]`.

    In order: temperature (0 or less: the first of the best), top_k (int32; V or more: off), top_p (share of what top_k
    left; 1: off), min_p (relative to the best; 0: off), then the inverse distribution, in the order of ids, at
    `uniform`, from 0 to 1. What ties at a filter's threshold is kept. NaN counts as minus infinity.
    """
    scores = logits.float().nan_to_num(nan=-torch.inf)
    gaps = scores.amax(dim=-1, keepdim=True) - scores
    greedy = temperature <= 0
    temperature = torch.where(greedy, 1.0, temperature)[:, None]
    limit = _MAX_LOG_RATIO * temperature
    ordered = gaps.sort(dim=-1).values
    vocab_size = logits.shape[-1]
    limit = torch.minimum(limit, ordered.gather(1, (top_k.long() - 1).clamp(0, vocab_size - 1)[:, None]))
    ends = torch.where(ordered <= limit, (-ordered / temperature).double().exp(), 0.0).cumsum(dim=-1)
    place = torch.searchsorted(ends, top_p[:, None] * ends[:, -1:]).clamp(max=vocab_size - 1)
    limit = torch.where(top_p[:, None] < 1, torch.minimum(limit, ordered.gather(1, place)), limit)
    limit = torch.minimum(limit, (temperature * min_p[:, None].log()).abs())
    limit = torch.where(greedy[:, None], 0.0, limit)
    weights = torch.where(gaps <= limit, (-gaps / temperature).double().exp(), 0.0)
    ends = weights.cumsum(dim=-1)
    # A float64 below 1 may have become 1 on its way.
    share = torch.where(greedy, 0.0, uniform.double().clamp(max=1 - 2.0**-24))
    drawn = torch.searchsorted(ends, share[:, None] * ends[:, -1:], right=True)
    return drawn.clamp(max=vocab_size - 1).squeeze(1)


def resample(image: torch.Tensor, starts: torch.Tensor, weights: torch.Tensor, precision_bits: int) -> torch.Tensor:
    """Weighted sums along the middle axis, in whole numbers: uint8 `[A, L, B]` -> `[A, P, B]`, P being the outputs.

    Output i begins at input `starts[i]`; `weights` int32 `[taps, P]` have `precision_bits` after the point, and are 0
    where there is no input. Sums are rounded half up and clamped to bytes (Pillow's resampling).
    """
    total = torch.full((), 1 << (precision_bits - 1), dtype=torch.int32, device=image.device)
    for tap, weight in enumerate(weights):
        inputs = image.index_select(1, (starts + tap).clamp(max=image.shape[1] - 1))
        total = total + inputs.to(torch.int32) * weight[:, None]
    return (total >> precision_bits).clamp_(0, 255).to(torch.uint8)
