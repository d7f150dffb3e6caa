"""Logits to token ids on the card: the greatest one, or a draw under temperature, top-k, top-p and min-p.

A filter keeps the tokens whose gap, the distance to the best logit of their row, is at most a limit; tokens that tie
at the limit are all kept. So nothing is sorted: the limit is found by bisection over the bits of the gap, which order
positive floats, until the candidates fit into one block, and then among them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl

# Logits a program of the first stage of `argmax`.
_CHUNK = 4096
# Logits that a program of `sample` reads at a time, the candidates it holds, its warps.
_BLOCK = 8192
_CANDIDATES = 4096
_NUM_WARPS = 16
_LOG2_E = tl.constexpr(1.4426950408889634)
# A token that is e^-87 times as likely as the best (the least normal float32) is not drawn.
_MAX_LOG_RATIO = tl.constexpr(87.0)
_LEAST = tl.constexpr(1.1754943508222875e-38)
_GREATEST = tl.constexpr(3.4028234663852886e38)
# Midpoints of the values converge fast on logits; then midpoints of the bits, which end after 31 whatever the values.
_VALUE_STEPS = tl.constexpr(8)


@triton.jit
def _load_logits(p_row, o_ids, vocab_size):
    """In float32 and without NaN and +inf; -inf past the vocabulary."""
    b_x = tl.load(p_row + o_ids, mask=o_ids < vocab_size, other=float("-inf")).to(tl.float32)
    return tl.minimum(tl.where(b_x == b_x, b_x, float("-inf")), _GREATEST)


@triton.jit
def _argmax_chunk_kernel(logits, chunk_max, chunk_ids, row_stride, vocab_size, num_chunks, CHUNK: tl.constexpr):
    i_chunk, i_row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_ids = i_chunk * CHUNK + tl.arange(0, CHUNK)
    b_x = _load_logits(logits + i_row * row_stride, o_ids, vocab_size)
    best, i_best = tl.max(b_x, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(chunk_max + i_row * num_chunks + i_chunk, best)
    tl.store(chunk_ids + i_row * num_chunks + i_chunk, i_chunk * CHUNK + i_best)


@triton.jit
def _argmax_row_kernel(chunk_max, chunk_ids, out, num_chunks, CHUNKS: tl.constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    o_chunks = tl.arange(0, CHUNKS)
    b_max = tl.load(chunk_max + i_row * num_chunks + o_chunks, mask=o_chunks < num_chunks, other=float("-inf"))
    _, i_best = tl.max(b_max, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(out + i_row, tl.load(chunk_ids + i_row * num_chunks + i_best).to(tl.int64))


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """The first of the greatest logits of each row, `[N, V]` of any float dtype -> int64 `[N]`.

    NaN counts as minus infinity. Two launches, so that few rows also keep the whole card busy.
    """
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1, "the logits of a row lie side by side"
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return out
    num_chunks = triton.cdiv(vocab_size, _CHUNK)
    chunk_max = torch.empty((num_rows, num_chunks), dtype=torch.float32, device=logits.device)
    chunk_ids = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=logits.device)
    _argmax_chunk_kernel[(num_chunks, num_rows)](
        logits, chunk_max, chunk_ids, logits.stride(0), vocab_size, num_chunks, CHUNK=_CHUNK, num_warps=4
    )
    _argmax_row_kernel[(num_rows,)](
        chunk_max, chunk_ids, out, num_chunks, CHUNKS=triton.next_power_of_2(num_chunks), num_warps=1
    )
    return out


@triton.jit
def _load_gaps(p_row, best, o_ids, vocab_size):
    """Distances to the best logit, infinite for what cannot be drawn."""
    return best - _load_logits(p_row, o_ids, vocab_size)


@triton.jit
def _bounds(p_row, vocab_size, BLOCK: tl.constexpr):
    """The greatest logit of a row and the least finite one."""
    b_max = tl.full([BLOCK], -_GREATEST, dtype=tl.float32)
    b_min = tl.full([BLOCK], _GREATEST, dtype=tl.float32)
    for start in range(0, vocab_size, BLOCK):
        b_x = _load_logits(p_row, start + tl.arange(0, BLOCK), vocab_size)
        b_max = tl.maximum(b_max, b_x)
        b_min = tl.minimum(b_min, tl.where(b_x >= -_GREATEST, b_x, _GREATEST))
    best = tl.max(b_max, axis=0)
    return best, tl.minimum(tl.min(b_min, axis=0), best)


@triton.jit
def _weights(b_gap, slope, limit):
    """`2 ** (-slope * gap)` where the gap is at most `limit`, else 0."""
    return tl.where(b_gap <= limit, tl.exp2(-slope * tl.minimum(b_gap, limit)), 0.0)


@triton.jit
def _weigh(p_row, best, slope, limit, vocab_size, BLOCK: tl.constexpr):
    """How many tokens have a gap of at most `limit`, and what they weigh."""
    b_count = tl.zeros([BLOCK], dtype=tl.int32)
    b_weight = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, vocab_size, BLOCK):
        b_gap = _load_gaps(p_row, best, start + tl.arange(0, BLOCK), vocab_size)
        b_count += (b_gap <= limit).to(tl.int32)
        b_weight += _weights(b_gap, slope, limit)
    return tl.sum(b_count, axis=0), tl.sum(b_weight, axis=0)


@triton.jit
def _collect(p_row, p_candidates, best, low, high, vocab_size, BLOCK: tl.constexpr, CANDIDATES: tl.constexpr):
    """The gaps above `low` and up to `high`, `[CANDIDATES]`, filled up with infinity; there must be room for them."""
    count = 0
    for start in range(0, vocab_size, BLOCK):
        b_gap = _load_gaps(p_row, best, start + tl.arange(0, BLOCK), vocab_size)
        m_inside = (b_gap > low) & (b_gap <= high)
        o_places = count + tl.cumsum(m_inside.to(tl.int32), axis=0) - 1
        tl.store(p_candidates + o_places, b_gap, mask=m_inside)
        count += tl.sum(m_inside.to(tl.int32), axis=0)
    # The threads of this program read what others of it wrote.
    tl.debug_barrier()
    o_places = tl.arange(0, CANDIDATES)
    return tl.load(p_candidates + o_places, mask=o_places < count, other=float("inf"))


@triton.jit
def _as_float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _midpoint(low, high, step):
    """Bits strictly between the bits `low` and `high`, of which `low` may be -1, below zero."""
    of_values = (0.5 * (_as_float(tl.maximum(low, 0)) + _as_float(high))).to(tl.int32, bitcast=True)
    middle = tl.where(step < _VALUE_STEPS, of_values, low + (high - low) // 2)
    return tl.minimum(tl.maximum(middle, low + 1), high - 1)


@triton.jit
def _narrow(
    p_row,
    p_candidates,
    best,
    slope,
    limit,
    count,
    weight,
    target,
    BY_COUNT: tl.constexpr,
    vocab_size,
    BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """The least limit whose tokens number, or weigh, at least `target`; and their number and weight.

    `limit` is one that does, with the `count` and `weight` of its tokens.
    """
    # Bits of gaps: `low` is known not to do (-1: no token), `high` does.
    low, high = tl.full([], -1, tl.int32), limit.to(tl.int32, bitcast=True)
    low_count, low_weight = tl.full([], 0, tl.int32), tl.full([], 0.0, tl.float32)
    step = tl.full([], 0, tl.int32)
    while (count - low_count > CANDIDATES) & (high - low > 1):
        middle = _midpoint(low, high, step)
        middle_count, middle_weight = _weigh(p_row, best, slope, _as_float(middle), vocab_size, BLOCK)
        does = middle_count >= target if BY_COUNT else middle_weight >= target
        low, high = tl.where(does, low, middle), tl.where(does, middle, high)
        low_count, count = tl.where(does, low_count, middle_count), tl.where(does, middle_count, count)
        low_weight, weight = tl.where(does, low_weight, middle_weight), tl.where(does, middle_weight, weight)
        step += 1
    if high - low > 1:
        low_gap = tl.where(low < 0, -1.0, _as_float(low))
        b_gap = _collect(p_row, p_candidates, best, low_gap, _as_float(high), vocab_size, BLOCK, CANDIDATES)
        b_weight = tl.exp2(-slope * b_gap)
        while high - low > 1:
            middle = _midpoint(low, high, step)
            m_kept = b_gap <= _as_float(middle)
            middle_count = low_count + tl.sum(m_kept.to(tl.int32), axis=0)
            middle_weight = low_weight + tl.sum(tl.where(m_kept, b_weight, 0.0), axis=0)
            does = middle_count >= target if BY_COUNT else middle_weight >= target
            low, high = tl.where(does, low, middle), tl.where(does, middle, high)
            count, weight = tl.where(does, middle_count, count), tl.where(does, middle_weight, weight)
            step += 1
    return _as_float(high), count, weight


@triton.jit
def _draw(p_row, best, slope, limit, uniform, vocab_size, BLOCK: tl.constexpr, TILES: tl.constexpr):
    """The token in the order of ids up to which the share `uniform` of the weight within `limit` lies."""
    o_tiles, o_lanes = tl.arange(0, TILES), tl.arange(0, BLOCK)
    b_tiles = tl.zeros([TILES], dtype=tl.float32)
    for start in range(0, vocab_size, BLOCK):
        b_gap = _load_gaps(p_row, best, start + o_lanes, vocab_size)
        b_weight = _weights(b_gap, slope, limit)
        b_tiles = tl.where(o_tiles == start // BLOCK, tl.sum(b_weight, axis=0), b_tiles)
    b_before = tl.cumsum(b_tiles, axis=0) - b_tiles
    target = uniform * tl.sum(b_tiles, axis=0)
    # The last that holds weight and begins by the target: rounding never carries the draw to what has none.
    i_tile = tl.max(tl.where((b_tiles > 0.0) & (b_before <= target), o_tiles, 0), axis=0)
    rest = target - tl.sum(tl.where(o_tiles == i_tile, b_before, 0.0), axis=0)
    b_gap = _load_gaps(p_row, best, i_tile * BLOCK + o_lanes, vocab_size)
    b_weight = _weights(b_gap, slope, limit)
    b_before = tl.cumsum(b_weight, axis=0) - b_weight
    i_lane = tl.max(tl.where((b_weight > 0.0) & (b_before <= rest), o_lanes, 0), axis=0)
    return i_tile * BLOCK + i_lane


@triton.jit
def _sample_kernel(
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    uniforms,
    candidates,
    out,
    row_stride,
    vocab_size,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    p_row, p_candidates = logits + i_row * row_stride, candidates + i_row * CANDIDATES
    temperature, uniform = tl.load(temperatures + i_row), tl.load(uniforms + i_row)
    top_k, top_p, min_p = tl.load(top_ks + i_row), tl.load(top_ps + i_row), tl.load(min_ps + i_row)
    best, worst = _bounds(p_row, vocab_size, BLOCK)
    # A greedy row is one whose filters leave the best, and of those that tie the first.
    is_random = temperature > 0.0
    temperature = tl.where(is_random, temperature, 1.0)
    # A float64 below 1 may have become 1 on its way.
    uniform = tl.where(is_random, tl.minimum(uniform, 1.0 - 2.0**-24), 0.0)
    slope = _LOG2_E / temperature
    limit = tl.where(is_random, tl.minimum(best - worst, temperature * _MAX_LOG_RATIO), 0.0)
    if is_random & ((top_k < vocab_size) | (top_p < 1.0)):
        count, weight = _weigh(p_row, best, slope, limit, vocab_size, BLOCK)
        if top_k < count:
            limit, count, weight = _narrow(
                p_row, p_candidates, best, slope, limit, count, weight, top_k, True, vocab_size, BLOCK, CANDIDATES
            )
        if top_p < 1.0:
            target = top_p * weight
            limit, count, weight = _narrow(
                p_row, p_candidates, best, slope, limit, count, weight, target, False, vocab_size, BLOCK, CANDIDATES
            )
    limit = tl.minimum(limit, tl.abs(temperature * tl.log(tl.maximum(min_p, _LEAST))))
    token_id = _draw(p_row, best, slope, limit, uniform, vocab_size, BLOCK, TILES)
    tl.store(out + i_row, token_id.to(tl.int64))


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    """Token ids, int64 `[N]`, drawn from logits `[N, V]` of any float dtype; the rest is `[N]`, one launch.

    In order: temperature (0 or less: the first of the best), top_k (int32; V or more: off), top_p (share of what top_k
    left; 1: off), min_p (relative to the best; 0: off), then the inverse distribution, in the order of ids, at
    `uniform`, from 0 to 1. What ties at a filter's threshold is kept. NaN counts as minus infinity.
    """
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1, "the logits of a row lie side by side"
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return out
    block = min(_BLOCK, triton.next_power_of_2(vocab_size))
    _sample_kernel[(num_rows,)](
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        uniform,
        torch.empty((num_rows, _CANDIDATES), dtype=torch.float32, device=logits.device),
        out,
        logits.stride(0),
        vocab_size,
        BLOCK=block,
        TILES=triton.next_power_of_2(triton.cdiv(vocab_size, block)),
        CANDIDATES=_CANDIDATES,
        num_warps=min(max(block // 512, 1), _NUM_WARPS),
    )
    return out
