"""The scheduler's policy: budget, order, admission, preemption and aborts."""

import pytest
from fake_runner import SchedulerDriver, answer_alone, own_token

from mmserve.errors import EngineError, RequestError
from mmserve.request import SequenceStatus


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


def test_time_in_the_queue_is_until_the_first_admission() -> None:
    driver = preempting_driver()
    driver.now = 3.0
    driver.step()
    assert driver.outputs["new"].queue_seconds == 3.0
    driver.now = 50.0
    driver.run()
    assert driver.scheduler.num_preemptions == 1
    assert driver.outputs["new"].queue_seconds == 3.0


# Sequences that begin alike


def test_who_begins_like_a_running_prompt_waits_for_it_and_shares_it() -> None:
    driver = SchedulerDriver(block_size=4)
    for name in "abc":
        driver.add(name, [1] * 9 + [2], max_tokens=2)
    assert driver.step() == {"a": 10}
    assert driver.step() == {"a": 1, "b": 2, "c": 2}
    assert driver.answers["a"] == driver.answers["b"] + driver.answers["a"][1:]
    driver.run()
    assert driver.answers["a"] == driver.answers["b"] == driver.answers["c"]
    driver.assert_nothing_is_owned()


def test_only_what_is_common_is_waited_for() -> None:
    driver = SchedulerDriver(block_size=4, max_num_batched_tokens=8)
    driver.add("long", [1] * 24, max_tokens=1)
    driver.add("short", [1] * 4 + [2] * 4, max_tokens=1)
    driver.add("other", [3] * 4, max_tokens=1)
    assert driver.step() == {"long": 8}
    assert driver.step() == {"long": 8}
    assert driver.step() == {"long": 8}
    assert driver.step() == {"short": 4, "other": 4}


def test_who_waits_for_a_prefix_lets_others_pass() -> None:
    driver = SchedulerDriver(block_size=4)
    driver.add("first", [1] * 8, max_tokens=3)
    driver.add("alike", [1] * 8 + [2], max_tokens=1)
    driver.add("other", [3] * 8, max_tokens=1)
    assert driver.step() == {"first": 8, "other": 8}
    assert driver.step() == {"first": 1, "alike": 1}


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_who_waits_goes_on_when_the_other_is_gone(prefix_caching: bool) -> None:
    driver = SchedulerDriver(block_size=4, max_num_batched_tokens=6, prefix_caching=prefix_caching)
    driver.add("first", [1] * 16, max_tokens=1)
    driver.add("alike", [1] * 16, max_tokens=1)
    driver.step()
    driver.scheduler.abort("first")
    assert driver.step() == {"alike": 6}
    driver.run()
    driver.assert_nothing_is_owned()
