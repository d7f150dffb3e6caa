"""What a user may ask for, and a sequence's view of its tokens."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.errors import RequestError
from mmserve.request import SamplingParams, Sequence

REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("n", {"n": 0}),
    ("n", {"n": 129}),
    ("max_tokens", {"max_tokens": 0}),
    ("min_tokens", {"min_tokens": -1}),
    ("min_tokens", {"min_tokens": 5, "max_tokens": 4}),
    ("logprobs", {"logprobs": 21}),
    ("logprobs", {"logprobs": -1}),
    ("stop", {"stop": ("",)}),
    ("stop", {"stop": ("x",) * 17}),
    ("stop", {"stop": ("x",), "detokenize": False}),
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": math.nan}),
    ("temperature", {"temperature": math.inf}),
    ("top_p", {"top_p": 0.0}),
    ("top_p", {"top_p": 1.01}),
    ("top_p", {"top_p": math.nan}),
    ("top_k", {"top_k": -1}),
    ("min_p", {"min_p": 1.5}),
    ("presence_penalty", {"presence_penalty": 2.1}),
    ("frequency_penalty", {"frequency_penalty": -2.1}),
    ("repetition_penalty", {"repetition_penalty": 0.0}),
    ("seed", {"seed": 2**63}),
    ("seed", {"seed": -(2**63) - 1}),
    ("logit_bias", {"logit_bias": {1: 100.5}}),
    ("logit_bias", {"logit_bias": {1: math.nan}}),
    ("logit_bias", {"logit_bias": dict.fromkeys(range(1025), 1.0)}),
]
ACCEPTED: list[dict[str, Any]] = [
    {"n": 128, "max_tokens": 1},
    {"min_tokens": 4, "max_tokens": 4},
    {"min_tokens": 100},
    {"logprobs": 0},
    {"logprobs": 20},
    {"stop": ("x",) * 16},
    {"temperature": 0.0, "top_p": 1.0, "min_p": 1.0},
    {"seed": 2**63 - 1},
    {"seed": -(2**63)},
    {"logit_bias": {7: -100.0, 8: 100.0}},
]


@pytest.mark.parametrize(("param", "fields"), REFUSED, ids=str)
def test_refused_with_the_name_of_the_field(param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**fields)
    assert caught.value.code == "invalid_request"
    assert caught.value.param == param
    assert param in str(caught.value)


@pytest.mark.parametrize("fields", ACCEPTED, ids=str)
def test_accepted_at_the_limits(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    assert {name: getattr(params, name) for name in fields} == fields


def test_greedy_is_temperature_zero() -> None:
    assert SamplingParams(temperature=0.0).is_greedy
    assert not SamplingParams().is_greedy


def test_params_are_frozen() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().n = 2  # type: ignore[misc]


@given(st.lists(st.integers(0, 9)), st.lists(st.integers(0, 9)), st.data())
def test_tokens_is_a_slice_of_prompt_and_output(prompt: list[int], output: list[int], data: st.DataObject) -> None:
    sequence = Sequence("a", prompt, SamplingParams(), output_token_ids=output)
    start = data.draw(st.integers(0, len(prompt) + len(output)))
    stop = data.draw(st.integers(start, len(prompt) + len(output)))
    assert sequence.num_tokens == len(prompt) + len(output)
    assert sequence.tokens(start, stop) == (prompt + output)[start:stop]
    assert sequence.token_ids == prompt + output


def test_sequences_with_equal_fields_are_not_equal() -> None:
    """Queues remove by identity: a request that looks like another must not go in its place."""
    assert Sequence("a", [1], SamplingParams()) != Sequence("a", [1], SamplingParams())
