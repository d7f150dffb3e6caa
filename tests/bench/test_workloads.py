"""The workloads, pinned: their ids must stay the same for figures of different versions and engines to compare."""

import hashlib
import json

import pytest

from mmserve.bench.workloads import WORKLOADS, build_workload
from mmserve.errors import RequestError

# sha256 of the prompts as `json.dumps` writes them.
DIGESTS = {
    "C1": "dcbb64f1e741efb6d4d286acef48ea2f0fdb3a1804be2d8175f668f8d1600800",
    "T1": "75d0a9d06247eeac134dd04c0b6f04f14023c40943f62f9ec97e574650bb8e35",
    "T3": "1cc1b88acc5899d33e851d643de00a6a1b48d5bf383665463f590f5053b6ad06",
    "T4": "0f98e085b4c2471874f6b9417f270ab185329b492a7738b4647d7f5529fe3f8f",
}


@pytest.mark.parametrize(("name", "digest"), DIGESTS.items())
def test_the_ids_are_pinned(name: str, digest: str) -> None:
    prompts = build_workload(name).prompts
    assert hashlib.sha256(json.dumps(prompts).encode()).hexdigest() == digest


@pytest.mark.parametrize(
    ("name", "num_prompts", "lengths", "max_tokens", "width"),
    [
        ("C1", 16, {256}, 64, 16),
        ("single", 4, {256}, 64, 1),
        ("T1", 256, {256}, 128, 256),
        ("T1-single", 4, {256}, 128, 1),
        ("T3", 200, set(range(10, 201)), 128, 200),
        ("T4", 256, {2112}, 64, 256),
    ],
)
def test_shapes(name: str, num_prompts: int, lengths: set[int], max_tokens: int, width: int) -> None:
    workload = build_workload(name)
    assert len(workload.prompts) == num_prompts
    assert {len(prompt) for prompt in workload.prompts} <= lengths
    assert (workload.name, workload.max_tokens, workload.width) == (name, max_tokens, width)


def test_single_streams_take_the_prompts_of_their_batches() -> None:
    assert build_workload("single", 16).prompts == build_workload("C1").prompts
    assert build_workload("T1-single", 256).prompts == build_workload("T1").prompts


def test_only_t4_has_a_prefix_that_is_warm_and_it_begins_each_prompt() -> None:
    assert [name for name in WORKLOADS if build_workload(name, 1).warm_prefix] == ["T4"]
    workload = build_workload("T4", 3)
    assert len(workload.warm_prefix) == 2048
    assert {prompt[:2048] for prompt in workload.prompts} == {workload.warm_prefix}
    assert len({prompt[2048:] for prompt in workload.prompts}) == 3


@pytest.mark.parametrize("name", WORKLOADS)
def test_fewer_prompts_are_the_first_of_more(name: str) -> None:
    assert build_workload(name, 5).prompts[:2] == build_workload(name, 2).prompts


def test_an_unknown_workload_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(RequestError, match="C1, single, T1, T1-single, T3, T4") as caught:
        build_workload("C9")
    assert caught.value.code == "invalid_request"
