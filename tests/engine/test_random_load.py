"""Random arrivals, aborts, prompts and limits: every request gets the answer that it gets alone."""

from collections.abc import Sequence
from unittest.mock import patch

import pytest
from fake_runner import EOS, SchedulerDriver, answer_alone
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from mmserve.cache.prefix_cache import block_hash
from mmserve.errors import MMServeError
from mmserve.request import ImageSpan, SamplingParams
from mmserve.request import Sequence as EngineSequence

STEM = [1, 2, 3, 1, 1, 4, 2, 2, 5, 1, 3, 3, 4, 4, 1, 2, 5, 5, 2, 1, 3, 4, 1, 5]
PLACEHOLDER = 5
images = st.builds(ImageSpan, st.integers(0, 2), st.sampled_from([5, 6]), st.sampled_from([b"X" * 16, b"Y" * 16]))
params = st.builds(
    SamplingParams,
    max_tokens=st.none() | st.integers(1, 12),
    min_tokens=st.integers(0, 1),
    ignore_eos=st.booleans(),
    stop_token_ids=st.sampled_from([(), (2,)]),
    # Needs to know the token before, whether or not it makes a difference here.
    presence_penalty=st.sampled_from([0.0, 1.0]),
)


def prompt_with(image: ImageSpan | None, prompt: list[int]) -> list[int]:
    """Placeholders under the image, whatever it shows."""
    if image is None:
        return prompt
    inside = range(image.offset, image.offset + image.length)
    return [PLACEHOLDER if position in inside else token for position, token in enumerate(prompt)]


def expected_answer(sequence: EngineSequence, max_model_len: int) -> list[int]:
    """By the rules of `SamplingParams`, without any engine."""
    params = sequence.params
    room = max_model_len - len(sequence.prompt_token_ids)
    answer = answer_alone(sequence.prompt_token_ids, sequence.images, min(params.max_tokens or room, room))
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
    ends = [i + 1 for i, token in enumerate(answer) if token in stops and i + 1 >= params.min_tokens]
    return answer[: ends[0]] if ends else answer


class RandomLoad(RuleBasedStateMachine):
    hashes = staticmethod(block_hash)

    @initialize(
        num_blocks=st.integers(2, 14),
        block_size=st.integers(1, 4),
        max_model_len=st.integers(4, 40),
        prefix_caching=st.sampled_from([True, True, True, False]),
        max_num_seqs=st.integers(1, 5),
        max_num_batched_tokens=st.integers(1, 20),
        steps_ahead=st.integers(0, 1),
    )
    def start(self, **limits: int) -> None:
        self._patch = patch("mmserve.engine.scheduler.block_hash", self.hashes)
        self._patch.start()
        self.driver = SchedulerDriver(eos_token_ids=(EOS,), max_num_waiting=6, **limits)  # type: ignore[arg-type]
        self.sequences: dict[str, EngineSequence] = {}
        self.aborted: set[str] = set()

    @rule(
        stem=st.sampled_from([0, 3, 8, 9, 16, len(STEM)]),
        tail=st.lists(st.integers(1, 5), max_size=6),
        image=st.none() | images,
        params=params,
    )
    def arrive(self, stem: int, tail: list[int], image: ImageSpan | None, params: SamplingParams) -> None:
        request_id = str(len(self.sequences))
        prompt = [*STEM[:stem], *tail] or [1]
        image = image if image and image.end <= len(prompt) else None
        prompt = prompt_with(image, prompt)
        scheduler = self.driver.scheduler
        fits = len(prompt) + (params.max_tokens or 1) <= scheduler.max_model_len
        if fits and len(scheduler.waiting) < 6:
            spans = (image,) if image else ()
            self.sequences[request_id] = self.driver.add(request_id, prompt, params, images=spans)
            return
        expected = "queue_full" if fits else "context_length_exceeded"
        before = (self.driver.waiting(), scheduler.pool.num_referenced)
        with pytest.raises(MMServeError) as caught:
            self.driver.add(request_id, prompt, params)
        assert caught.value.code == expected
        assert (self.driver.waiting(), scheduler.pool.num_referenced) == before

    @rule()
    def step(self) -> None:
        before = self.driver.running()
        self.driver.step()
        # The oldest is never sent back: this is why the load as a whole always moves on.
        assert not before or before[0] not in self.driver.waiting()

    @precondition(lambda self: self.driver.scheduler.has_work)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self.driver.running() + self.driver.waiting()))
        assert self.driver.scheduler.abort(request_id)
        self.aborted.add(request_id)
        assert self.sequences[request_id].block_ids == []

    def teardown(self) -> None:
        try:
            if hasattr(self, "driver"):
                self.driver.run()
                self.driver.assert_nothing_is_owned()
                self._check_answers()
        finally:
            self._patch.stop()

    def _check_answers(self) -> None:
        for request_id, sequence in self.sequences.items():
            expected = expected_answer(sequence, self.driver.scheduler.max_model_len)
            answer = self.driver.answers[request_id]
            if request_id in self.aborted:
                assert answer == expected[: len(answer)]
            else:
                assert answer == expected
                assert self.driver.outputs[request_id].finish_reason in ("stop", "length")


class CollidingLoad(RandomLoad):
    """The same with a hash that is always equal, so that only the tokens tell blocks apart."""

    @staticmethod
    def hashes(parent_hash: bytes, token_ids: Sequence[int], start: int, images: Sequence[ImageSpan] = ()) -> bytes:
        return repr(images).encode()


TestRandomLoad = RandomLoad.TestCase
TestRandomLoad.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestCollidingLoad = CollidingLoad.TestCase
TestCollidingLoad.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
