"""The sampler against independent references: transformers' processors, brute force in float64, chi-square tests."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mmserve.engine.sampler import MIN_LOGPROB, NUM_CANDIDATES, Sampler, check_token_ids, uniform
from mmserve.errors import RequestError
from mmserve.request import SampledToken, SamplingParams, Sequence

EOS = 2


def make_sequence(
    *, prompt: tuple[int, ...] = (1, 3, 3), output: tuple[int, ...] = (), seed: int = 0, **params: Any
) -> Sequence:
    choices = SamplingParams(**params)
    return Sequence(
        request_id="r", prompt_token_ids=list(prompt), output_token_ids=list(output), seed=seed, params=choices
    )


def sample(logits: torch.Tensor, *sequences: Sequence) -> list[SampledToken]:
    return Sampler(eos_token_ids=(EOS,)).sample(logits, sequences).take()


def sample_ids(logits: torch.Tensor, *sequences: Sequence) -> list[int]:
    return [token.token_id for token in sample(logits, *sequences)]


def draws(row: torch.Tensor, count: int, **params: Any) -> list[int]:
    """`count` tokens for one row of logits, each with a seed of its own."""
    return sample_ids(row.expand(count, -1), *(make_sequence(seed=seed, **params) for seed in range(count)))


def random_logits(rows: int, vocab_size: int, *, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def reference_probs(row: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The distribution that transformers' processors leave of one row."""
    scores = row[None].double()
    no_ids = torch.empty(1, 0, dtype=torch.long)
    warpers: list[Any] = [TemperatureLogitsWarper(params.temperature)]
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    for warper in warpers:
        scores = warper(no_ids, scores)
    return scores.softmax(dim=-1)[0]


def assert_follows(tokens: list[int], probs: torch.Tensor) -> None:
    """Chi-square at about one in a million, the rare tokens in one bin; nothing of probability 0 may occur."""
    counts = np.bincount(tokens, minlength=len(probs)).astype(float)
    expected = probs.numpy() * len(tokens)
    assert counts[expected == 0].sum() == 0
    common = expected >= 8
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    filled = wanted > 1e-9
    chi_square = float((((observed - wanted) ** 2)[filled] / wanted[filled]).sum())
    degrees = int(filled.sum()) - 1
    assert degrees >= 1
    # Wilson and Hilferty's normal approximation of the chi-square distribution.
    deviation = ((chi_square / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
    assert deviation < 4.75


# Greedy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_maximum_and_the_first_of_equals(dtype: torch.dtype) -> None:
    logits = random_logits(5, 1000).to(dtype)
    logits[2, [400, 77, 900]] = 100.0
    greedy = [make_sequence(temperature=0.0) for _ in range(5)]
    assert sample_ids(logits, *greedy) == logits.float().argmax(dim=-1).tolist()
    assert sample_ids(logits, *greedy)[2] == 77


def test_a_plain_greedy_batch_does_nothing_but_look_for_the_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a plain greedy batch needs none of this")

    for name in ("sort", "topk", "softmax", "logsumexp", "exp", "float", "cumsum", "to", "clone"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    logits = random_logits(3, 500)
    assert len(sample_ids(logits, *(make_sequence(temperature=0.0) for _ in range(3)))) == 3


@pytest.mark.parametrize("params", [{"top_k": 1}, {"temperature": 1e-30}, {"top_p": 1e-9}, {"min_p": 1.0}])
def test_limits_of_the_random_settings_are_greedy(params: dict[str, Any]) -> None:
    logits = random_logits(20, 800)
    assert sample_ids(logits, *(make_sequence(seed=i, **params) for i in range(20))) == logits.argmax(-1).tolist()


def test_the_logits_are_left_as_they_were() -> None:
    logits = random_logits(1, 300)
    before = logits.clone()
    biased: dict[str, Any] = {
        "logit_bias": {7: 50.0},
        "presence_penalty": 1.0,
        "repetition_penalty": 2.0,
        "min_tokens": 5,
    }
    sample(logits, make_sequence(output=(4,), **biased))
    assert torch.equal(logits, before)


# Filters


FILTERS: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"temperature": 1.0},
    {"top_p": 0.6},
    {"top_k": 5},
    {"min_p": 0.05},
    {"temperature": 1.8, "top_p": 0.9, "top_k": 12, "min_p": 0.02},
    {"temperature": 0.5, "top_p": 0.95, "min_p": 0.1},
]


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_draws_follow_the_distribution_of_transformers_processors(params: dict[str, Any]) -> None:
    row = random_logits(1, 40, scale=1.5)[0]
    assert_follows(draws(row, 4000, **params), reference_probs(row, SamplingParams(**params)))


@pytest.mark.parametrize(
    "params", [{}, {"min_p": 0.2}, {"top_p": 0.97}, {"top_k": 700}, {"top_k": 700, "top_p": 0.9}], ids=str
)
def test_a_nucleus_wider_than_the_candidates_is_exact(params: dict[str, Any]) -> None:
    row = random_logits(1, 3000, scale=0.5)[0]
    probs = reference_probs(row, SamplingParams(**params))
    assert int((probs > 0).sum()) > NUM_CANDIDATES
    tokens = draws(row, 6000, **params)
    assert int((torch.bincount(torch.tensor(tokens), minlength=3000)[probs == 0]).sum()) == 0
    # Bins of 30 tokens have expectations that a chi-square test can use.
    bins = probs.sort(descending=True).values.reshape(100, 30).sum(dim=-1)
    rank = probs.argsort(descending=True).argsort()
    assert_follows((rank[torch.tensor(tokens)] // 30).tolist(), bins)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    vocab_size=st.sampled_from([3, 127, 128, 129, 700]),
    temperature=st.floats(0.1, 3.0),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1]),
    top_k=st.sampled_from([0, 2, 50, 255, 256, 257, 699, 10**9]),
    min_p=st.sampled_from([0.0, 0.01, 0.5]),
    scale=st.sampled_from([0.1, 2.0, 20.0]),
)
def test_only_tokens_that_the_filters_keep_are_drawn(
    seed: int, vocab_size: int, temperature: float, top_p: float, top_k: int, min_p: float, scale: float
) -> None:
    row = random_logits(1, vocab_size, seed=seed, scale=scale)[0]
    filters: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    probs = reference_probs(row, SamplingParams(**filters))
    assert (probs[draws(row, 50, **filters)] > 0).all()


def test_every_token_of_a_small_nucleus_is_reached_and_no_other() -> None:
    row = torch.full((1000,), -30.0)
    row[[10, 500, 999]] = torch.tensor([0.5, 0.3, 0.2]).log()
    assert set(draws(row, 200, top_p=0.75)) == {10, 500}
    assert set(draws(row, 200)) == {10, 500, 999}
    assert set(draws(row, 200, top_k=2)) == {10, 500}
    assert set(draws(row, 200, min_p=0.41)) == {10, 500}


def test_top_p_is_a_share_of_the_row_s_own_top_k_whatever_its_neighbour_filters_by() -> None:
    row = torch.tensor([0.3, 0.2, 0.1, 0.1, 0.1, 0.1, 0.1]).log()
    both = [make_sequence(seed=seed, top_k=2, top_p=0.59) for seed in range(100)]
    tokens = sample_ids(row.expand(101, -1), *both, make_sequence(top_p=0.9))
    assert set(tokens[:100]) == {0}


@pytest.mark.parametrize(("draw", "expected"), [(0.0, 1), (1 - 2.0**-52, 398)])
@pytest.mark.parametrize("params", [{}, {"top_k": 399}, {"top_p": 0.9999999}], ids=str)
def test_the_ends_of_the_unit_interval_draw_tokens_that_are_possible(
    draw: float, expected: int, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmserve.engine.sampler.uniform", lambda seed, step: draw)
    row = torch.linspace(1.0, 0.0, 400)
    row[[0, 399]] = -torch.inf
    assert draws(row, 1, **params) == [expected]


def test_equal_logits_with_top_k_leave_exactly_k() -> None:
    assert len(set(draws(torch.zeros(500), 400, top_k=3))) == 3


def test_top_k_beyond_the_vocabulary_is_off() -> None:
    row = random_logits(1, 50)[0]
    assert draws(row, 100, top_k=50) == draws(row, 100, top_k=10**12) == draws(row, 100)


# Penalties, bias, bans


def adjusted_by_hand(row: torch.Tensor, sequence: Sequence) -> torch.Tensor:
    """Penalties and bias written a second time, one token at a time in float64."""
    params, scores = sequence.params, row.double().clone()
    for token_id in set(sequence.token_ids):
        penalty = params.repetition_penalty
        scores[token_id] = scores[token_id] / penalty if scores[token_id] > 0 else scores[token_id] * penalty
    for token_id in set(sequence.output_token_ids):
        count = sequence.output_token_ids.count(token_id)
        scores[token_id] -= params.frequency_penalty * count + params.presence_penalty
    for token_id, bias in params.logit_bias.items():
        scores[token_id] += bias
    return scores


PENALTIES: list[dict[str, Any]] = [
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7},
    {"frequency_penalty": -0.5, "presence_penalty": -1.0},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.4},
    {"logit_bias": {5: 4.0, 11: -100.0}},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.3, "presence_penalty": 0.2, "logit_bias": {3: 3.0}},
    {},
]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.sampled_from(PENALTIES), min_size=1, max_size=6), st.data())
def test_penalties_and_bias_equal_those_by_hand(seed: int, settings_of_rows: list[dict[str, Any]], data: Any) -> None:
    logits = random_logits(len(settings_of_rows), 20, seed=seed, scale=2.0)
    tokens = st.lists(st.integers(0, 19), max_size=12).map(tuple)
    sequences = [
        make_sequence(temperature=0.0, prompt=(0, *data.draw(tokens)), output=data.draw(tokens), **params)
        for params in settings_of_rows
    ]
    by_hand = [int(adjusted_by_hand(row, s).argmax()) for row, s in zip(logits, sequences, strict=True)]
    assert sample_ids(logits, *sequences) == by_hand


def test_repetition_penalty_is_that_of_transformers() -> None:
    logits = random_logits(30, 25, scale=1.0)
    rng = np.random.default_rng(0)
    sequences = [
        make_sequence(
            temperature=0.0, repetition_penalty=1.7, prompt=tuple(rng.integers(0, 25, 9)), output=tuple([4] * 3)
        )
        for _ in range(30)
    ]
    processor = RepetitionPenaltyLogitsProcessor(1.7)
    ids = torch.tensor([sequence.token_ids for sequence in sequences])
    expected = processor(ids, logits.clone()).argmax(dim=-1)
    assert sample_ids(logits, *sequences) == expected.tolist()
    assert expected.tolist() != logits.argmax(dim=-1).tolist()


def test_penalties_act_before_temperature_and_filters() -> None:
    row = torch.tensor([3.0, 2.9, 2.8, -5.0])
    assert set(draws(row, 100, output=(0,), presence_penalty=2.0, top_k=2)) == {1, 2}


def test_a_biased_token_is_forced_or_forbidden_in_random_draws() -> None:
    row = random_logits(1, 100)[0]
    best = int(row.argmax())
    assert set(draws(row, 50, logit_bias={77: 100.0})) == {77}
    assert best not in draws(row, 300, logit_bias={best: -100.0})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_bans_the_ends_until_they_are_allowed(temperature: float) -> None:
    row = torch.tensor([[0.0, 0.0, 60.0, 50.0, 40.0]])
    params: dict[str, Any] = {"temperature": temperature, "min_tokens": 2, "stop_token_ids": (3,)}
    assert sample_ids(row, make_sequence(**params)) == [4]
    assert sample_ids(row, make_sequence(output=(0,), **params)) == [4]
    assert sample_ids(row, make_sequence(output=(0, 0), **params)) == [EOS]
    assert sample_ids(row, make_sequence(ignore_eos=True, **params)) == [EOS]
    assert sample_ids(row, make_sequence(logit_bias={EOS: 100.0}, **params)) == [4]


# Seeds


def test_tokens_of_a_request_do_not_depend_on_its_neighbours() -> None:
    logits = random_logits(40, 2000)
    kinds: list[dict[str, Any]] = [*FILTERS, *PENALTIES, {"temperature": 0.0}, {"top_p": 0.99, "temperature": 2.0}]
    sequences = [make_sequence(seed=i, output=(5,) * (i % 3), **kinds[i % len(kinds)]) for i in range(40)]
    together = sample_ids(logits, *sequences)
    alone = [sample_ids(logits[i : i + 1], sequence)[0] for i, sequence in enumerate(sequences)]
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = sample_ids(logits[order], *(sequences[i] for i in order))
    assert together == alone
    assert shuffled == [together[i] for i in order]


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [401, 151936])
def test_a_gpu_gives_the_tokens_of_the_cpu_together_and_alone(vocab_size: int) -> None:
    kinds: list[dict[str, Any]] = [*FILTERS, *PENALTIES, {"temperature": 0.0, "logprobs": 2}, {"top_p": 0.999}]
    logits = random_logits(48, vocab_size)
    logits[::9] = math.nan
    sequences = [make_sequence(seed=i, output=(5,) * (i % 3), **kinds[i % len(kinds)]) for i in range(48)]
    healthy = [i for i in range(48) if i % 9]
    together = sample_ids(logits.cuda(), *sequences)
    assert all(0 <= token_id < vocab_size for token_id in together)
    on_cpu = sample_ids(logits, *sequences)
    assert [together[i] for i in healthy] == [on_cpu[i] for i in healthy]
    assert [together[i] for i in healthy] == [sample_ids(logits[i : i + 1].cuda(), sequences[i])[0] for i in healthy]


def test_the_seed_and_the_step_decide() -> None:
    row = torch.zeros(1, 5000)
    first = [sample_ids(row, make_sequence(seed=9, output=(0,) * step))[0] for step in range(8)]
    again = [sample_ids(row, make_sequence(seed=9, output=(1,) * step))[0] for step in range(8)]
    other = [sample_ids(row, make_sequence(seed=10, output=(0,) * step))[0] for step in range(8)]
    assert first == again
    assert len(set(first)) > 4
    assert first != other


def test_uniform_is_uniform_over_seeds_and_over_steps() -> None:
    for numbers in ([uniform(seed, 0) for seed in range(4000)], [uniform(-7, step) for step in range(4000)]):
        assert_follows([int(number * 20) for number in numbers], torch.full((20,), 0.05, dtype=torch.float64))
    assert all(0.0 <= uniform(2**64 + seed, 3) < 1.0 for seed in range(100))


# Log-probabilities


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = random_logits(2, 60)
    expected = logits.double().log_softmax(dim=-1)
    sequence = make_sequence(logprobs=3, temperature=0.0, logit_bias={8: 100.0})
    token = sample(logits, sequence, make_sequence(temperature=0.0))[0]
    assert token.logprob is not None
    assert token.token_id == token.logprob.token_id == 8
    assert token.logprob.logprob == pytest.approx(float(expected[0, 8]), abs=1e-5)
    values, ids = expected[0].topk(3)
    assert [token_id for token_id, _ in token.logprob.top] == ids.tolist()
    assert [value for _, value in token.logprob.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_logprobs_of_half_precision_logits_are_computed_in_single() -> None:
    logits = random_logits(1, 5000).bfloat16()
    token = sample(logits, make_sequence(logprobs=0, temperature=0.0))[0]
    assert token.logprob is not None
    expected = float(logits.double().log_softmax(dim=-1).max())
    assert token.logprob.logprob == pytest.approx(expected, abs=1e-5)


def test_logprobs_come_only_to_rows_that_want_them() -> None:
    rows = random_logits(4, 9)
    wishes = [None, 0, 20, 2]
    tokens = sample(rows, *(make_sequence(logprobs=wish) for wish in wishes))
    assert tokens[0].logprob is None
    assert [len(token.logprob.top) for token in tokens[1:] if token.logprob] == [0, 9, 2]


def test_logprobs_are_finite() -> None:
    row = torch.tensor([[0.0, -torch.inf, -torch.inf]])
    token = sample(row, make_sequence(temperature=0.0, logprobs=2))[0]
    assert token.logprob is not None
    assert [value for _, value in token.logprob.top] == [0.0, MIN_LOGPROB]


# Broken input


@pytest.mark.parametrize("broken", [math.nan, -math.inf, math.inf])
def test_a_broken_row_does_not_disturb_its_neighbours(broken: float) -> None:
    kinds: list[dict[str, Any]] = [*FILTERS, *PENALTIES, {"temperature": 0.0, "logprobs": 5}, {"logprobs": 5}]
    logits = random_logits(2 * len(kinds), 401)
    sequences = [make_sequence(seed=i, output=(5, 5), **kinds[i // 2]) for i in range(len(logits))]
    healthy = sample(logits, *sequences)
    logits[1::2] = broken
    mixed = sample(logits, *sequences)
    assert mixed[::2] == healthy[::2]
    assert all(0 <= token.token_id < 401 for token in mixed)
    assert all(math.isfinite(token.logprob.logprob) for token in mixed if token.logprob)


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"logit_bias": {100: 1.0}}, "logit_bias"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"stop_token_ids": (3, 100)}, "stop_token_ids"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(params: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError, match="0 to 99") as caught:
        check_token_ids(SamplingParams(**params), 100)
    assert (caught.value.code, caught.value.param) == ("invalid_request", param)


def test_ids_inside_the_vocabulary_pass() -> None:
    params = SamplingParams(logit_bias={0: 1.0, 99: -1.0}, stop_token_ids=(0, 99))
    check_token_ids(params, 100)
    assert sample_ids(random_logits(1, 100), make_sequence(logit_bias={99: 100.0}, stop_token_ids=(0,))) == [99]
