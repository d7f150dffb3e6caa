"""Which images a step encodes, what it waits for, and how long an image stays."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from image_load import ImageLoad, Piece, sequence_of

from mmserve.cache.encoder_cache import EncoderCache
from mmserve.engine.image_planner import ImagePlanner
from mmserve.errors import RequestError

PAGE = ("page", 6)


def test_a_prompt_with_images_runs_in_one_step() -> None:
    load = ImageLoad()
    load.add("a", [3, PAGE, 2, ("other", 5), 1])
    assert load.step() == {"a": 17}
    assert load.encoded == [b"page6", b"other5"]
    load.run()
    assert load.scheduler.images.cache.num_tokens == 11


def test_over_the_budget_the_chunk_is_cut_just_before_the_image() -> None:
    load = ImageLoad(max_encoder_tokens=8)
    load.add("a", [3, PAGE, 2, ("other", 5), 1])
    assert load.step() == {"a": 3 + 6 + 2}
    assert load.step() == {"a": 5 + 1}


def test_an_image_larger_than_the_budget_goes_alone() -> None:
    load = ImageLoad(max_encoder_tokens=2)
    load.add("a", [3, PAGE, ("other", 5), 1])
    assert load.step() == {"a": 9}
    assert load.step() == {"a": 6}


def test_a_chunk_that_ends_before_an_image_does_not_encode_it() -> None:
    load = ImageLoad(max_num_batched_tokens=3)
    load.add("a", [3, PAGE, 1])
    load.step()
    assert load.encoded == []
    load.step()
    assert load.encoded == [b"page6"]


def test_an_image_stays_pinned_until_its_last_token_is_computed() -> None:
    load = ImageLoad(max_num_batched_tokens=4, encoder_cache_tokens=6)
    load.add("a", [1, PAGE, 4])
    load.step()
    assert load.scheduler.images.cache.num_pins(b"page6") == 1
    load.step()
    assert load.scheduler.images.cache.num_pins(b"page6") == 0
    assert b"page6" in load.scheduler.images.cache


def test_one_page_of_two_requests_is_encoded_once_in_a_step_and_later() -> None:
    load = ImageLoad(prefix_caching=False)
    load.add("a", [1, PAGE, 1])
    load.add("b", [2, PAGE, 1])
    assert load.step() == {"a": 8, "b": 9}
    load.run()
    load.add("c", [3, PAGE, 1])
    load.run()
    assert load.encoded == [b"page6"]
    cache = load.scheduler.images.cache
    assert (cache.num_queries, cache.num_hits) == (3, 2)


def test_without_room_an_image_waits_for_the_pins_of_others() -> None:
    load = ImageLoad(encoder_cache_tokens=6, max_num_batched_tokens=10, prefix_caching=False)
    load.add("a", [6, PAGE, 1], max_tokens=1)
    load.add("b", [1, ("other", 6), 1], max_tokens=1)
    assert load.step() == {"a": 10}
    assert load.step() == {"a": 3, "b": 1}
    assert load.step() == {"b": 7}


def test_text_runs_beside_an_image_that_waits() -> None:
    load = ImageLoad(encoder_cache_tokens=6, max_num_batched_tokens=10, prefix_caching=False)
    load.add("a", [8, PAGE, 1], max_tokens=1)
    load.add("b", [("other", 6), 1], max_tokens=1)
    load.add("c", [3], max_tokens=1)
    assert load.step() == {"a": 10}
    assert load.step() == {"a": 5, "c": 3}
    assert load.step() == {"b": 7}


def test_a_waiting_image_is_not_starved_by_smaller_ones_that_come_after() -> None:
    """Each small image is pinned before the last one's pin is gone, so that the cache would never be empty."""
    load = ImageLoad(encoder_cache_tokens=6, max_num_batched_tokens=3, prefix_caching=False)
    load.add("first", [1, ("s", 3)], max_tokens=1)
    load.add("large", [("l", 6)], max_tokens=1)
    for i in range(4):
        load.add(f"small{i}", [(f"s{i}", 3)], max_tokens=1)
    order = [name for step in load.run() for name in step]
    assert order.index("large") < order.index("small0")


def test_a_sequence_without_token_budget_obtains_no_image() -> None:
    """One whose cached prefix ended inside an image stands in it already."""
    planner = ImagePlanner(EncoderCache(10), 10)
    sequence = sequence_of("a", [1, PAGE, 1])
    sequence.num_computed_tokens = 4
    assert planner.cut(sequence, 0) == 0
    assert planner.planned() == ()
    assert b"page6" not in planner.cache
    assert planner.cut(sequence, 4) == 4
    assert planner.planned() == sequence.images


def test_an_image_that_stands_in_the_prompt_twice_does_not_bar_the_way() -> None:
    load = ImageLoad(encoder_cache_tokens=6)
    load.add("a", [1, PAGE, 1, ("other", 6), 1, PAGE, 1])
    assert load.step() == {"a": 8}
    assert load.step() == {"a": 7}
    assert load.step() == {"a": 7}
    assert load.encoded == [b"page6", b"other6", b"page6"]


def test_a_prefix_hit_inside_an_image_needs_it_and_one_behind_it_does_not() -> None:
    load = ImageLoad(block_size=4)
    load.add("a", [1, PAGE, 6])
    load.run()
    load.scheduler.images.cache.reserve(b"filler", load.scheduler.images.cache.capacity_tokens)
    load.scheduler.images.cache.release(b"filler")
    assert b"page6" not in load.scheduler.images.cache
    load.add("behind", [1, PAGE, 6])
    assert load.step() == {"behind": 1}
    assert load.encoded == [b"page6"]
    load.run()
    load.add("inside", [1, PAGE])
    assert load.step() == {"inside": 3}
    assert load.encoded == [b"page6"] * 2


def test_preemption_inside_an_image_gives_its_pin_back() -> None:
    load = ImageLoad(num_blocks=6, block_size=2, max_num_batched_tokens=4, prefix_caching=False)
    old = load.add("old", [2], max_tokens=8)
    load.step()
    young = load.add("young", [1, PAGE, 1], max_tokens=1)
    load.step()
    assert young.num_computed_tokens == 3
    load.scheduler._preempt(young)
    assert not load.scheduler.images._pinned
    load.run()
    assert len(young.output_token_ids) == 1
    assert len(old.output_token_ids) == 8


def test_abort_inside_an_image_gives_its_pin_back() -> None:
    load = ImageLoad(max_num_batched_tokens=4)
    load.add("a", [1, PAGE, 1])
    load.step()
    assert load.scheduler.images._pinned
    assert load.scheduler.abort("a")
    assert not load.scheduler.images._pinned
    assert load.scheduler.images.cache.num_pins(b"page6") == 0


@pytest.mark.parametrize(
    ("limits", "option"),
    [({"encoder_cache_tokens": 5}, "--encoder-cache-tokens"), ({"num_blocks": 1}, "--max-model-len")],
)
def test_an_image_that_no_step_can_hold_is_refused_with_advice(limits: dict[str, int], option: str) -> None:
    load = ImageLoad(**limits)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=option) as caught:
        load.add("a", [PAGE])
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "max_pixels"
    assert not load.scheduler.has_work


pieces = st.lists(st.integers(1, 9) | st.tuples(st.sampled_from("xyz"), st.integers(1, 8)), min_size=1, max_size=6)


class RandomImages(RuleBasedStateMachine):
    """Whatever arrives, leaves and is preempted: `ImageLoad` checks every step, and all requests end."""

    @initialize(
        num_blocks=st.integers(6, 30),
        block_size=st.integers(1, 4),
        prefix_caching=st.booleans(),
        max_num_seqs=st.integers(1, 5),
        max_num_batched_tokens=st.integers(1, 24),
        max_encoder_tokens=st.integers(1, 20),
        encoder_cache_tokens=st.integers(8, 24),
    )
    def start(self, **limits: int) -> None:
        self.load = ImageLoad(**limits)  # type: ignore[arg-type]
        self.num_requests = 0

    @rule(pieces=pieces, max_tokens=st.integers(1, 12))
    def arrive(self, pieces: list[Piece], max_tokens: int) -> None:
        self.num_requests += 1
        largest = max((piece[1] for piece in pieces if isinstance(piece, tuple)), default=0)
        num_tokens = sum(piece if isinstance(piece, int) else piece[1] for piece in pieces) + max_tokens
        scheduler = self.load.scheduler
        if num_tokens <= scheduler.max_model_len and largest <= scheduler.images.cache.capacity_tokens:
            self.load.add(str(self.num_requests), pieces, max_tokens=max_tokens)
            return
        with pytest.raises(RequestError) as caught:
            self.load.add(str(self.num_requests), pieces, max_tokens=max_tokens)
        assert caught.value.code == "context_length_exceeded"

    @rule()
    def step(self) -> None:
        self.load.step()

    @precondition(lambda self: self.load.scheduler.running)
    @rule()
    def preempt_newest(self) -> None:
        self.load.scheduler._preempt(self.load.scheduler.running[-1])

    @precondition(lambda self: self.load.scheduler.has_work)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        scheduler = self.load.scheduler
        names = [sequence.request_id for sequence in (*scheduler.running, *scheduler.waiting)]
        assert scheduler.abort(data.draw(st.sampled_from(names)))

    def teardown(self) -> None:
        if hasattr(self, "load"):
            self.load.run()


TestRandomImages = RandomImages.TestCase
TestRandomImages.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
