"""The scheduler's policy: budget, order, admission, preemption, prefix hits, and what ends a sequence."""

import pytest
from fake_runner import EOS, VOCAB_SIZE, SchedulerDriver, answer_alone, own_token

from mmserve.errors import EngineError, RequestError
from mmserve.request import ImageSpan, SamplingParams, SequenceStatus

ALL_TOKENS = tuple(range(VOCAB_SIZE))


def test_a_prompt_then_one_token_a_step() -> None:
    driver = SchedulerDriver()
    driver.add("a", 10, max_tokens=3)
    assert driver.run() == [{"a": 10}, {"a": 1}, {"a": 1}]
    assert len(driver.answers["a"]) == 3
    driver.assert_nothing_is_owned()


def test_a_long_prompt_is_cut_at_the_budget_and_samples_only_at_its_end() -> None:
    driver = SchedulerDriver(max_num_batched_tokens=4)
    driver.add("a", 10, max_tokens=2)
    assert [driver.step(), driver.step()] == [{"a": 4}, {"a": 4}]
    assert driver.answers["a"] == []
    assert driver.step() == {"a": 2}
    assert len(driver.answers["a"]) == 1
    driver.run()
    assert driver.answers["a"] == answer_alone([own_token("a")] * 10, (), 2)


def test_running_sequences_are_served_before_waiting_ones() -> None:
    driver = SchedulerDriver(max_num_batched_tokens=6)
    driver.add("a", 5, max_tokens=9)
    driver.step()
    driver.add("b", 5, max_tokens=9)
    driver.add("c", 5, max_tokens=9)
    assert list(driver.step().items()) == [("a", 1), ("b", 5)]
    assert list(driver.step().items()) == [("a", 1), ("b", 1), ("c", 4)]
    assert list(driver.step().items()) == [("a", 1), ("b", 1), ("c", 1)]


def test_the_rest_of_the_budget_goes_to_the_next_prompt() -> None:
    driver = SchedulerDriver(max_num_batched_tokens=8)
    driver.add("a", 5, max_tokens=1)
    driver.add("b", 5, max_tokens=1)
    assert driver.step() == {"a": 5, "b": 3}
    assert driver.step() == {"b": 2}


def test_a_budget_below_the_running_sequences_serves_the_oldest() -> None:
    driver = SchedulerDriver(max_num_batched_tokens=2)
    for request_id in "abc":
        driver.add(request_id, 1, max_tokens=3)
    steps = driver.run()
    assert steps[:3] == [{"a": 1, "b": 1}, {"a": 1, "b": 1}, {"a": 1, "b": 1}]
    assert steps[3:] == [{"c": 1}] * 3


def test_seats_are_limited() -> None:
    driver = SchedulerDriver(max_num_seqs=2)
    for request_id in "abc":
        driver.add(request_id, 2, max_tokens=2)
    assert set(driver.step()) == {"a", "b"}
    assert driver.waiting() == ["c"]
    assert set(driver.step()) == {"a", "b"}
    assert set(driver.step()) == {"c"}


def test_a_prompt_that_does_not_fit_now_waits_and_is_not_overtaken() -> None:
    driver = SchedulerDriver(num_blocks=4, block_size=4, prefix_caching=False)
    driver.add("a", 8, max_tokens=4)
    driver.add("large", 12, max_tokens=1)
    driver.add("small", 1, max_tokens=1)
    assert driver.step() == {"a": 8}
    assert driver.waiting() == ["large", "small"]
    driver.run()
    assert all(len(answer) >= 1 for answer in driver.answers.values())


# Admission


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "param"),
    [(20, None, "prompt"), (25, 1, "prompt"), (19, 2, "max_tokens"), (10, 11, "max_tokens"), (1, 10**9, "max_tokens")],
)
def test_what_can_never_fit_is_refused(num_prompt_tokens: int, max_tokens: int | None, param: str) -> None:
    driver = SchedulerDriver(max_model_len=20)
    with pytest.raises(RequestError, match="--max-model-len") as caught:
        driver.add("a", num_prompt_tokens, max_tokens=max_tokens)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == param
    assert str(num_prompt_tokens) in str(caught.value)
    driver.assert_nothing_is_owned()


@pytest.mark.parametrize(("num_prompt_tokens", "max_tokens"), [(19, None), (19, 1), (10, 10)])
def test_what_just_fits_is_served(num_prompt_tokens: int, max_tokens: int | None) -> None:
    driver = SchedulerDriver(max_model_len=20, num_blocks=5, block_size=4)
    driver.add("a", num_prompt_tokens, max_tokens=max_tokens)
    driver.run()
    assert len(driver.answers["a"]) == 20 - num_prompt_tokens
    assert driver.outputs["a"].finish_reason == "length"


def test_a_pool_below_the_models_context_bounds_the_context() -> None:
    """Otherwise a request without max_tokens would grow until nothing but itself is left to preempt."""
    driver = SchedulerDriver(max_model_len=1000, num_blocks=3, block_size=4)
    assert driver.scheduler.max_model_len == 12
    driver.add("a", 5)
    driver.run()
    assert len(driver.answers["a"]) == 7
    with pytest.raises(RequestError, match="12"):
        driver.add("b", 12)


def test_a_full_queue_refuses() -> None:
    driver = SchedulerDriver(max_num_waiting=2)
    driver.add("a", 1, max_tokens=5)
    driver.add("b", 1, max_tokens=5)
    with pytest.raises(EngineError) as caught:
        driver.add("c", 1, max_tokens=5)
    assert caught.value.code == "queue_full"
    driver.step()
    driver.add("c", 1, max_tokens=5)
    assert driver.waiting() == ["c"]


def test_an_id_in_use_refuses_the_second_only() -> None:
    driver = SchedulerDriver()
    driver.add("a", 3, max_tokens=2)
    with pytest.raises(RequestError) as caught:
        driver.scheduler.add(driver.scheduler.waiting[0])
    assert (caught.value.code, caught.value.param) == ("invalid_request", "request_id")
    driver.step()
    with pytest.raises(RequestError):
        driver.add("a", 3)
    assert driver.run() == [{"a": 1}]
    driver.add("a", 3, max_tokens=1)
    driver.run()
    driver.assert_nothing_is_owned()


# Preemption


def preempting_driver() -> SchedulerDriver:
    """Two sequences of two blocks in a pool of four: the next token of the older one needs a block of the newer."""
    driver = SchedulerDriver(num_blocks=4, block_size=4, prefix_caching=False)
    driver.add("old", 8, max_tokens=6)
    driver.add("new", 8, max_tokens=6)
    return driver


def test_the_newest_is_preempted_and_goes_first_again() -> None:
    driver = preempting_driver()
    driver.step()
    driver.add("late", 1, max_tokens=1)
    assert driver.step() == {"old": 1}
    assert driver.running() == ["old"]
    assert driver.waiting() == ["new", "late"]
    assert driver.scheduler.num_preemptions == 1
    assert driver.scheduler.stats().num_preemptions == 1


def test_a_preempted_sequence_owns_nothing_and_is_computed_again() -> None:
    driver = preempting_driver()
    new = driver.scheduler.waiting[1]
    driver.step()
    driver.step()
    assert new.status is SequenceStatus.WAITING
    assert (new.block_ids, new.num_computed_tokens, new.num_tokens) == ([], 0, 9)
    steps = driver.run()
    assert {"new": 9} in steps
    assert driver.answers["new"] == answer_alone([own_token("new")] * 8, (), 6)
    assert driver.answers["old"] == answer_alone([own_token("old")] * 8, (), 6)


def test_sequences_do_not_preempt_each_other_for_ever() -> None:
    driver = preempting_driver()
    assert len(driver.run()) <= 14
    assert driver.scheduler.num_preemptions == 1
    driver.assert_nothing_is_owned()


def test_several_that_are_preempted_keep_their_order() -> None:
    driver = SchedulerDriver(num_blocks=4, block_size=4, prefix_caching=False)
    driver.add("a", 7, max_tokens=9)
    driver.add("b", 3, max_tokens=9)
    driver.add("c", 4, max_tokens=9)
    driver.add("d", 1, max_tokens=1)
    driver.step()
    assert driver.running() == ["a", "b", "c"]
    driver.step()
    assert (driver.running(), driver.waiting()) == (["a", "b"], ["c", "d"])
    driver.step()
    assert (driver.running(), driver.waiting()) == (["a"], ["b", "c", "d"])
    driver.run()
    assert [len(driver.answers[i]) for i in "abcd"] == [9, 9, 9, 1]


def test_a_prompt_is_preempted_in_its_middle() -> None:
    driver = SchedulerDriver(num_blocks=4, block_size=4, max_num_batched_tokens=3, prefix_caching=False)
    driver.add("a", 6, max_tokens=8)
    driver.step()
    driver.step()
    driver.add("b", 8, max_tokens=1)
    assert [driver.step(), driver.step(), driver.step()] == [{"a": 1, "b": 2}, {"a": 1, "b": 2}, {"a": 1}]
    assert driver.waiting() == ["b"]
    driver.run()
    assert driver.answers["b"] == answer_alone([own_token("b")] * 8, (), 1)


# Abort


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 4])
def test_abort_frees_everything_in_every_state(num_steps: int) -> None:
    """Waiting, in the middle of the prompt, decoding, and preempted."""
    driver = SchedulerDriver(num_blocks=4, block_size=4, max_num_batched_tokens=9, prefix_caching=False)
    driver.add("old", 8, max_tokens=6)
    driver.add("new", 8, max_tokens=6)
    for _ in range(num_steps):
        driver.step()
    assert driver.scheduler.abort("new")
    assert not driver.scheduler.abort("new")
    driver.run()
    assert driver.answers["old"] == answer_alone([own_token("old")] * 8, (), 6)
    driver.assert_nothing_is_owned()


def test_abort_of_a_preempted_sequence() -> None:
    driver = preempting_driver()
    driver.step()
    driver.step()
    assert driver.waiting() == ["new"]
    assert driver.scheduler.abort("new")
    assert driver.waiting() == []
    driver.run()
    driver.assert_nothing_is_owned()


def test_abort_while_the_batch_is_out() -> None:
    driver = SchedulerDriver()
    driver.add("a", 4, max_tokens=4)
    driver.add("b", 4, max_tokens=4)
    batch = driver.scheduler.schedule()
    sampled = driver.runner.run(batch)
    driver.scheduler.abort("a")
    outputs = driver.scheduler.update(batch, sampled)
    assert [output.request_id for output in outputs] == ["b"]
    driver.scheduler.abort("b")
    driver.assert_nothing_is_owned()


def test_abort_of_what_is_not_there() -> None:
    driver = SchedulerDriver()
    assert not driver.scheduler.abort("nobody")
    driver.add("a", 1, max_tokens=1)
    driver.run()
    assert not driver.scheduler.abort("a")


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


def test_time_in_the_queue_is_until_the_first_admission() -> None:
    driver = preempting_driver()
    driver.now = 3.0
    driver.step()
    assert driver.outputs["new"].queue_seconds == 3.0
    driver.now = 50.0
    driver.run()
    assert driver.scheduler.num_preemptions == 1
    assert driver.outputs["new"].queue_seconds == 3.0
