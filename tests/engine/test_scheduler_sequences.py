"""What the scheduler does for one sequence: prefix hits, what ends it, and what is told about it."""

import pytest
from fake_runner import EOS, VOCAB_SIZE, SchedulerDriver, answer_alone

from mmserve.request import ImageSpan, SamplingParams

ALL_TOKENS = tuple(range(VOCAB_SIZE))

# Prefix cache

PROMPT = [index % 5 for index in range(13)]


def test_a_second_request_computes_only_what_is_new() -> None:
    driver = SchedulerDriver(block_size=4)
    driver.add("a", PROMPT, max_tokens=1)
    driver.run()
    driver.add("b", [*PROMPT[:9], 5, 5, 5, 5], max_tokens=1)
    assert driver.step() == {"b": 5}
    assert driver.outputs["b"].num_cached_tokens == 8
    assert driver.outputs["a"].num_cached_tokens == 0
    stats = driver.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (26, 8)


def test_the_last_token_is_always_computed() -> None:
    driver = SchedulerDriver(block_size=4)
    driver.add("a", PROMPT[:8], max_tokens=1)
    driver.run()
    driver.add("b", PROMPT[:8], max_tokens=1)
    assert driver.step() == {"b": 4}
    driver.add("c", PROMPT[:9], max_tokens=1)
    assert driver.step() == {"c": 1}
    assert driver.answers["b"] == driver.answers["a"] == answer_alone(PROMPT[:8], (), 1)


def test_generated_tokens_are_cached_too() -> None:
    driver = SchedulerDriver(block_size=4)
    driver.add("a", PROMPT, max_tokens=8)
    driver.run()
    driver.add("b", [*PROMPT, *driver.answers["a"]], max_tokens=1)
    assert driver.step() == {"b": 1}
    assert driver.outputs["b"].num_cached_tokens == 20


def test_a_running_sequence_shares_its_blocks() -> None:
    driver = SchedulerDriver(block_size=4)
    driver.add("a", PROMPT, max_tokens=9)
    driver.step()
    driver.add("b", PROMPT, max_tokens=9)
    assert driver.step() == {"a": 1, "b": 1}
    a, b = driver.scheduler.running
    assert a.block_ids[:3] == b.block_ids[:3]
    assert a.block_ids[3] != b.block_ids[3]
    assert driver.scheduler.pool.num_references(a.block_ids[0]) == 2
    driver.run()
    assert driver.answers["a"] == driver.answers["b"] == answer_alone(PROMPT, (), 9)


def test_a_shared_block_outlives_the_first_owner() -> None:
    driver = SchedulerDriver(block_size=4)
    driver.add("a", PROMPT, max_tokens=9)
    driver.step()
    driver.add("b", PROMPT, max_tokens=9)
    driver.step()
    driver.scheduler.abort("a")
    driver.run()
    assert driver.answers["b"] == answer_alone(PROMPT, (), 9)


def test_without_the_cache_everything_is_computed() -> None:
    driver = SchedulerDriver(block_size=4, prefix_caching=False)
    for request_id in "ab":
        driver.add(request_id, PROMPT, max_tokens=1)
        assert driver.step() == {request_id: 13}
    stats = driver.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (0, 0)


def test_evicted_prefixes_are_computed_again() -> None:
    driver = SchedulerDriver(num_blocks=4, block_size=4)
    driver.add("a", PROMPT, max_tokens=1)
    driver.run()
    driver.add("other", 15, max_tokens=1)
    driver.run()
    driver.add("b", PROMPT, max_tokens=1)
    assert driver.step() == {"b": 13}
    assert driver.answers["b"] == driver.answers["a"]


def test_a_preempted_sequence_finds_its_own_blocks_again_and_counts_once() -> None:
    driver = SchedulerDriver(num_blocks=4, block_size=4)
    old, new = [1] * 8, [2] * 8
    driver.add("old", old, max_tokens=6)
    driver.add("new", new, max_tokens=6)
    driver.run()
    assert driver.scheduler.num_preemptions == 1
    assert driver.answers["new"] == answer_alone(new, (), 6)
    assert driver.outputs["new"].num_cached_tokens == 0
    assert driver.scheduler.stats().prefix_cache_queries == 16


def test_equal_placeholders_of_different_images_share_nothing() -> None:
    driver = SchedulerDriver(block_size=4)
    images = {name: (ImageSpan(2, 9, name.encode() * 16),) for name in ("x", "y")}
    for request_id, name in (("first", "x"), ("second", "y"), ("again", "x")):
        driver.add(request_id, [5] * 13, max_tokens=2, images=images[name])
        driver.run()
    assert [driver.outputs[i].num_cached_tokens for i in ("first", "second", "again")] == [0, 0, 12]
    assert driver.answers["second"] == answer_alone([5] * 13, images["y"], 2)
    assert driver.answers["again"] == answer_alone([5] * 13, images["x"], 2)


def test_a_hash_that_always_collides_costs_hits_but_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmserve.engine.scheduler.block_hash", lambda *_: b"same")
    driver = SchedulerDriver(block_size=4)
    prompts = {str(first): [first, *PROMPT] for first in range(4)}
    for request_id, prompt in [*prompts.items(), *((f"{i} again", p) for i, p in prompts.items())]:
        driver.add(request_id, prompt, max_tokens=4)
        driver.run()
        assert driver.answers[request_id] == answer_alone(prompt, (), 4)
    assert driver.outputs["0 again"].num_cached_tokens == 4
    driver.assert_nothing_is_owned()


# What ends a sequence


def finished(params: SamplingParams, *, eos: tuple[int, ...] = (), max_model_len: int = 1000) -> SchedulerDriver:
    driver = SchedulerDriver(eos_token_ids=eos, max_model_len=max_model_len)
    driver.add("a", PROMPT, params)
    driver.run()
    driver.assert_nothing_is_owned()
    return driver


ANSWER = answer_alone(PROMPT, (), 40)
FIRST_EOS = ANSWER.index(EOS) + 1


def test_max_tokens() -> None:
    driver = finished(SamplingParams(max_tokens=7))
    assert driver.answers["a"] == ANSWER[:7]
    assert (driver.outputs["a"].finish_reason, driver.outputs["a"].stop_token_id) == ("length", None)


def test_max_model_len() -> None:
    driver = finished(SamplingParams(), max_model_len=20)
    assert driver.answers["a"] == ANSWER[:7]
    assert driver.outputs["a"].finish_reason == "length"


def test_end_of_sequence() -> None:
    driver = finished(SamplingParams(max_tokens=40), eos=(EOS,))
    assert driver.answers["a"] == ANSWER[:FIRST_EOS]
    assert (driver.outputs["a"].finish_reason, driver.outputs["a"].stop_token_id) == ("stop", EOS)


def test_ignored_end_of_sequence() -> None:
    driver = finished(SamplingParams(max_tokens=40, ignore_eos=True), eos=(EOS,))
    assert driver.answers["a"] == ANSWER
    assert driver.outputs["a"].finish_reason == "length"


def test_stop_token_ids_hold_even_where_the_end_of_sequence_is_ignored() -> None:
    driver = finished(SamplingParams(max_tokens=40, ignore_eos=True, stop_token_ids=(EOS,)), eos=(EOS,))
    assert driver.answers["a"] == ANSWER[:FIRST_EOS]
    assert driver.outputs["a"].stop_token_id == EOS


@pytest.mark.parametrize("min_tokens", [1, 2, 5, 40])
def test_min_tokens_puts_off_every_stop(min_tokens: int) -> None:
    params = SamplingParams(max_tokens=40, min_tokens=min_tokens, stop_token_ids=ALL_TOKENS)
    assert len(finished(params, eos=(EOS,)).answers["a"]) == min_tokens


def test_min_tokens_does_not_exceed_the_context() -> None:
    params = SamplingParams(min_tokens=500, stop_token_ids=ALL_TOKENS)
    assert len(finished(params, max_model_len=20).answers["a"]) == 7


def test_a_stop_at_the_last_token_is_a_stop() -> None:
    driver = finished(SamplingParams(max_tokens=FIRST_EOS), eos=(EOS,))
    assert driver.outputs["a"].finish_reason == "stop"


# What is told


def test_statistics_follow_the_queues() -> None:
    driver = SchedulerDriver(num_blocks=8, block_size=4, max_num_seqs=1)
    driver.add("a", 7, max_tokens=2)
    driver.add("b", 7, max_tokens=2)
    assert (driver.scheduler.stats().num_requests_running, driver.scheduler.stats().num_requests_waiting) == (0, 2)
    driver.step()
    stats = driver.scheduler.stats()
    assert (stats.num_requests_running, stats.num_requests_waiting) == (1, 1)
    assert stats.kv_cache_usage_ratio == 2 / 8
    driver.run()
    stats = driver.scheduler.stats()
    assert (stats.num_requests_running, stats.num_requests_waiting, stats.kv_cache_usage_ratio) == (0, 0, 0.0)
