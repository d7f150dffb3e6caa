"""Logits to token ids: one batched call a step, in which only the rows that ask for a feature pay for it.

Order of the adjustments: repetition penalty (Hugging Face's: prompt and output), frequency and presence penalties
(OpenAI's: output only), logit_bias, the ban of min_tokens, the tokens that a grammar allows. Order of the filters, as
in `transformers`: temperature, top_k, top_p, min_p. A row's draw depends on its own logits, seed and number of output
tokens, never on its neighbours.
"""

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Rows
from functools import cache
from itertools import chain

import numpy as np
import torch
import torch.nn.functional as F

from mmserve.engine.structured import forbid_tokens, token_masks
from mmserve.errors import RequestError
from mmserve.kernels.transfer import record_event, to_device, to_host
from mmserve.request import MAX_LOGPROBS, SampledToken, SamplingParams, Sequence, TokenLogprob

# Written for a log-probability of minus infinity, which JSON cannot carry; the value is OpenAI's.
MIN_LOGPROB = -9999.0
MIN_TEMPERATURE = 1e-5
# topk of 256 out of 49,152 takes 0.12 ms a row on one CPU core; a sort takes 3.3 ms.
NUM_CANDIDATES = 256
WIDENING = 16
DRAW_BLOCK = 128


class PendingTokens:
    """What a step sampled: on a GPU it is still being computed, and `take` waits for it."""

    def __init__(self, token_ids: torch.Tensor, logprobs: "PendingLogprobs | None" = None) -> None:
        """`token_ids` `[n]` stay on their device, for the next step."""
        self.token_ids = token_ids
        self._logprobs = logprobs
        self._on_host = to_host(token_ids)
        self._event = record_event(token_ids.device) if token_ids.device.type == "cuda" else None

    def take(self) -> list[SampledToken]:
        """One token a row."""
        if self._event is not None:
            self._event.synchronize()
        token_ids = self._on_host.tolist()
        logprobs = self._logprobs.take(token_ids) if self._logprobs else {}
        return [SampledToken(token_id, logprobs.get(row)) for row, token_id in enumerate(token_ids)]


class Sampler:
    """Chooses the next token of every sequence; keeps nothing between calls."""

    def __init__(self, *, eos_token_ids: Iterable[int]) -> None:
        self._eos_token_ids = tuple(eos_token_ids)

    def sample(
        self,
        logits: torch.Tensor,
        sequences: Rows[Sequence],
        num_output_tokens: Rows[int] | None = None,
        best: torch.Tensor | None = None,
    ) -> PendingTokens:
        """`logits` is [n, vocab] of any float dtype and is left as it was; row i belongs to `sequences[i]`.

        `num_output_tokens` counts those before this one, pending ones among them; `best` [n] are the rows' maxima,
        where they are known. A row of NaN gets an arbitrary token of the vocabulary, and its neighbours theirs.
        """
        counts = num_output_tokens or [len(sequence.output_token_ids) for sequence in sequences]
        # Not argmax, which takes six times as long on CPU bfloat16.
        chosen = logits.max(dim=-1).indices if best is None else best
        banned = [self._banned_ids(sequence, count) for sequence, count in zip(sequences, counts, strict=True)]
        special = [row for row, sequence in enumerate(sequences) if banned[row] or _is_special(sequence.params)]
        if special:
            rows = to_device(special, logits.device)
            scores = logits.index_select(0, rows).to(torch.float32, copy=True)
            picked = _choose(
                scores, [sequences[i] for i in special], [counts[i] for i in special], [banned[i] for i in special]
            )
            chosen = chosen.index_copy(0, rows, picked)
        return PendingTokens(chosen, _logprobs(logits, chosen, sequences))

    def _banned_ids(self, sequence: Sequence, num_output_tokens: int) -> tuple[int, ...]:
        params = sequence.params
        # A grammar takes the token for the end of the answer, so that none may come where it would be ignored.
        goes_on = params.ignore_eos and sequence.matcher is not None
        if num_output_tokens >= params.min_tokens:
            return self._eos_token_ids if goes_on else ()
        return params.stop_token_ids + (() if params.ignore_eos and not goes_on else self._eos_token_ids)


def _is_special(params: SamplingParams) -> bool:
    return _is_random(params) or params.needs_last_token or bool(params.logit_bias)


def _choose(
    scores: torch.Tensor, sequences: Rows[Sequence], counts: Rows[int], banned: Rows[tuple[int, ...]]
) -> torch.Tensor:
    """Adjusts `scores` [n, vocab] in place -> token ids [n]."""
    _apply_repetition_penalty(scores, sequences)
    _apply_count_penalties(scores, sequences)
    _apply_logit_bias(scores, sequences)
    plain = [() if sequence.matcher else ids for sequence, ids in zip(sequences, banned, strict=True)]
    if any(plain):
        scores[_pairs(scores, plain)] = -torch.inf
    _apply_grammars(scores, sequences, banned)
    random = [row for row, sequence in enumerate(sequences) if _is_random(sequence.params)]
    if len(random) == len(sequences):
        return _draw(scores, sequences, counts)
    chosen = scores.max(dim=-1).indices
    if random:
        rows = to_device(random, scores.device)
        drawn = _draw(scores[rows], [sequences[row] for row in random], [counts[row] for row in random])
        chosen = chosen.index_copy(0, rows, drawn)
    return chosen


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """To be called at admission: raises `RequestError` naming an id in `params` that is not in the vocabulary."""
    for param, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        for token_id in ids:
            if not 0 <= token_id < vocab_size:
                sentence = f"{param} holds token id {token_id}; this model's ids go from 0 to {vocab_size - 1}"
                raise RequestError("invalid_request", sentence, param=param)


def uniform(seed: int, step: int) -> float:
    """A number in [0, 1 - 2**-52] that depends on `seed` and `step` alone."""
    digest = hashlib.blake2b(f"{seed}:{step}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest) >> 12) * 2.0**-52


def _is_random(params: SamplingParams) -> bool:
    return not params.is_greedy and params.top_k != 1


def _penalises_counts(params: SamplingParams) -> bool:
    return params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def _pairs(like: torch.Tensor, ids_of_rows: Rows[Collection[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """One list of ids a row -> flat (rows, ids), to index `like` [n, vocab] with."""
    lengths = [len(ids) for ids in ids_of_rows]
    rows = np.repeat(np.arange(len(lengths)), lengths)
    ids = np.fromiter(chain.from_iterable(ids_of_rows), dtype=np.int64, count=sum(lengths))
    return to_device(rows, like.device), to_device(ids, like.device)


def _apply_repetition_penalty(scores: torch.Tensor, sequences: Rows[Sequence]) -> None:
    penalties = [sequence.params.repetition_penalty for sequence in sequences]
    if all(penalty == 1.0 for penalty in penalties):
        return
    rows, ids = _pairs(scores, [[] if s.params.repetition_penalty == 1.0 else s.token_ids for s in sequences])
    penalty = to_device(penalties, scores.device, scores.dtype)[rows]
    # An id that occurs twice is written twice, with the same value.
    seen = scores[rows, ids]
    scores[rows, ids] = torch.where(seen > 0, seen / penalty, seen * penalty)


def _apply_count_penalties(scores: torch.Tensor, sequences: Rows[Sequence]) -> None:
    if not any(_penalises_counts(sequence.params) for sequence in sequences):
        return
    outputs = [s.output_token_ids if _penalises_counts(s.params) else [] for s in sequences]
    pairs = _pairs(scores, outputs)
    counts = torch.zeros_like(scores).index_put_(pairs, scores.new_ones(len(pairs[0])), accumulate=True)
    presence = to_device([sequence.params.presence_penalty for sequence in sequences], scores.device, scores.dtype)
    frequency = to_device([sequence.params.frequency_penalty for sequence in sequences], scores.device, scores.dtype)
    scores -= presence[:, None] * (counts > 0) + frequency[:, None] * counts


def _apply_logit_bias(scores: torch.Tensor, sequences: Rows[Sequence]) -> None:
    biases = [sequence.params.logit_bias for sequence in sequences]
    if any(biases):
        values = to_device([value for bias in biases for value in bias.values()], scores.device, scores.dtype)
        scores.index_put_(_pairs(scores, biases), values, accumulate=True)


def _apply_grammars(scores: torch.Tensor, sequences: Rows[Sequence], banned: Rows[tuple[int, ...]]) -> None:
    """Leave each row with a grammar the tokens that may come next, and of banned ones only where nothing else may."""
    rows = [row for row, sequence in enumerate(sequences) if sequence.matcher is not None]
    if not rows:
        return
    masks = token_masks([sequences[row] for row in rows])
    for mask, row in zip(masks, rows, strict=True):
        forbid_tokens(mask, banned[row])
    # 0.05 ms a row of 49,152 on one CPU core, where `masked_fill_` alone takes up to 0.25 ms.
    scores_of_byte = _scores_of_byte(scores.device)
    penalties = F.embedding(to_device(masks.astype(np.int32), scores.device), scores_of_byte)
    penalties = penalties.flatten(1)[:, : scores.shape[-1]]
    if len(rows) == len(sequences):
        scores += penalties
    else:
        scores.index_add_(0, to_device(rows, scores.device), penalties)


@cache
def _scores_of_byte(device: torch.device) -> torch.Tensor:
    """`[256, 8]`: for each byte of a mask, what its eight tokens get."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return to_device(np.where(bits == 1, np.float32(0), np.float32(-np.inf)), device)


def _draw(scores: torch.Tensor, sequences: Rows[Sequence], counts: Rows[int]) -> torch.Tensor:
    """Random token ids [n] from adjusted `scores` [n, vocab]."""
    choices = [s.params for s in sequences]
    vocab_size = scores.shape[-1]
    rows = [
        [max(params.temperature, MIN_TEMPERATURE) for params in choices],
        [min(params.top_k or vocab_size, vocab_size) for params in choices],
        [params.top_p for params in choices],
        [params.min_p for params in choices],
        [uniform(s.seed, count) for s, count in zip(sequences, counts, strict=True)],
    ]
    settings = to_device(np.array(rows), scores.device)
    if scores.device.type == "cuda":
        from mmserve.kernels.sampling import sample

        temperature, top_k, top_p, min_p, draw = settings.float()
        return sample(scores, temperature, top_k.int(), top_p, min_p, draw)
    scores = (scores - scores.amax(dim=-1, keepdim=True)) / settings[0, :, None].float()
    narrow = [row for row, params in enumerate(choices) if params.top_p < 1.0 or 0 < params.top_k < vocab_size]
    if len(narrow) == len(choices):
        return _draw_narrow(scores, settings, min(NUM_CANDIDATES, vocab_size))
    if not narrow:
        return _draw_wide(scores, settings)
    drawn = _draw_wide(scores, settings)
    drawn[narrow] = _draw_narrow(scores[narrow], settings[:, narrow], min(NUM_CANDIDATES, vocab_size))
    return drawn


def _draw_wide(scores: torch.Tensor, settings: torch.Tensor) -> torch.Tensor:
    """Draws by inverse distribution over the whole vocabulary, min_p being a threshold that needs no order.

    First a block of the vocabulary is drawn, then a token in it: over 49,152 tokens the sums of the blocks take 0.01 ms
    a row on one CPU core, a float64 cumsum of everything 0.35 ms.
    """
    _, _, _, min_p, draw = settings
    weights = scores.exp()
    weights = torch.where(weights >= min_p[:, None].float(), weights, 0.0)
    weights = F.pad(weights, (0, -weights.shape[-1] % DRAW_BLOCK)).reshape(len(scores), -1, DRAW_BLOCK)
    blocks = weights.sum(dim=-1, dtype=torch.float64)
    ends = blocks.cumsum(dim=-1)
    target = draw[:, None] * ends[:, -1:]
    block = _first_above(ends, target)
    every_row = torch.arange(len(scores), device=scores.device)[:, None]
    inside = weights[every_row, block].squeeze(1).cumsum(dim=-1, dtype=torch.float64)
    start = ends.gather(1, block) - blocks.gather(1, block)
    # Rounding must not carry the target past the last token of the block that can be drawn.
    rest = torch.minimum(target - start, inside[:, -1:] * (1 - 2.0**-52))
    token_ids = (block * DRAW_BLOCK + _first_above(inside, rest)).squeeze(1)
    return token_ids.clamp(max=scores.shape[-1] - 1)


def _draw_narrow(scores: torch.Tensor, settings: torch.Tensor, num_candidates: int) -> torch.Tensor:
    """Draws among the `num_candidates` best; rows whose filters let more through are drawn again, from more."""
    _, top_k, top_p, min_p, draw = settings[:, :, None]
    best, token_ids = scores.topk(num_candidates, dim=-1)
    weights = best.exp().double()
    rank = torch.arange(num_candidates, device=scores.device)
    weights = torch.where(rank < top_k, weights, 0.0)
    ends = weights.cumsum(dim=-1)
    has_top_k = top_k < scores.shape[-1]
    total = ends[:, -1:] if bool(has_top_k.all()) else _totals(scores, ends, has_top_k)
    kept = (rank < top_k) & (ends - weights < top_p * total) & (weights >= min_p)
    drawn = _draw_in_order(torch.where(kept, weights, 0.0), token_ids, draw)
    overflow = ((top_k > num_candidates) & (has_top_k | kept[:, -1:])).squeeze(1)
    if bool(overflow.any()):
        more = min(num_candidates * WIDENING, scores.shape[-1])
        drawn[overflow] = _draw_narrow(scores[overflow], settings[:, overflow], more)
    return drawn


def _draw_in_order(weights: torch.Tensor, token_ids: torch.Tensor, draw: torch.Tensor) -> torch.Tensor:
    """By inverse distribution in the order of the vocabulary; a token of weight 0 is never drawn."""
    token_ids, order = token_ids.sort(dim=-1)
    weights = weights.gather(1, order)
    ends = weights.cumsum(dim=-1)
    rank = torch.arange(weights.shape[-1], device=weights.device)
    last = torch.where(weights > 0, rank, 0).amax(dim=-1, keepdim=True)
    place = torch.minimum(_first_above(ends, draw * ends[:, -1:]), last)
    return token_ids.gather(1, place).squeeze(1)


def _totals(scores: torch.Tensor, ends: torch.Tensor, has_top_k: torch.Tensor) -> torch.Tensor:
    """The mass [n, 1] of which top_p is a share: that of the top_k, or of the whole vocabulary."""
    whole = scores.exp().sum(dim=-1, keepdim=True, dtype=torch.float64)
    return torch.where(has_top_k, ends[:, -1:], whole)


def _first_above(ends: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Per row of `ends` [n, m], which ascends: the first index [n, 1] whose value is above `target` [n, 1]."""
    return torch.searchsorted(ends, target, right=True).clamp(max=ends.shape[-1] - 1)


class PendingLogprobs:
    """Log-probabilities of the raw logits, for the rows that want them."""

    def __init__(self, logits: torch.Tensor, chosen: torch.Tensor, num_wanted: Mapping[int, int]) -> None:
        """`num_wanted`: row of `logits` -> number of alternatives."""
        self._num_wanted = num_wanted
        rows = to_device(list(num_wanted), logits.device)
        raw = logits.index_select(0, rows).float()
        raw = raw - raw.logsumexp(dim=-1, keepdim=True)
        best, best_ids = raw.topk(min(MAX_LOGPROBS, raw.shape[-1]), dim=-1)
        own = raw.gather(1, chosen.index_select(0, rows)[:, None])
        self._on_host = tuple(map(to_host, (own[:, 0], best_ids, best)))

    def take(self, token_ids: Rows[int]) -> dict[int, TokenLogprob]:
        """By row; the copies to the host must be complete."""
        own, best_ids, best = (values.tolist() for values in self._on_host)
        return {
            row: TokenLogprob(
                token_ids[row], _finite(value), tuple(zip(ids, map(_finite, values), strict=True))[:num_wanted]
            )
            for (row, num_wanted), value, ids, values in zip(self._num_wanted.items(), own, best_ids, best, strict=True)
        }


def _logprobs(logits: torch.Tensor, chosen: torch.Tensor, sequences: Rows[Sequence]) -> PendingLogprobs | None:
    num_wanted = {row: s.params.logprobs for row, s in enumerate(sequences) if s.params.logprobs is not None}
    return PendingLogprobs(logits, chosen, num_wanted) if num_wanted else None


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB) if not math.isnan(logprob) else MIN_LOGPROB
