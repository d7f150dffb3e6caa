"""What goes through the pipe comes out as it went in."""

import pickle
from multiprocessing.reduction import ForkingPickler

import pytest

from mmserve.engine.messages import EngineStats, RequestFailure, StepOutput, TokenOutput
from mmserve.request import TokenLogprob

STATS = EngineStats(num_requests_running=3, kv_cache_usage_ratio=0.25, encoder_seconds=1.5)
OUTPUTS = (
    TokenOutput("a/0", (7,), num_cached_tokens=16, queue_seconds=0.125),
    TokenOutput("b/1", (1, 2), (TokenLogprob(1, -0.5, ((3, -1.0),)), TokenLogprob(2, -0.25)), "stop", 2),
    TokenOutput("c/2", finish_reason="error", failure=RequestFailure("queue_full", "later", "n")),
)


@pytest.mark.parametrize("outputs", [(), OUTPUTS[:1], OUTPUTS], ids=len)
def test_a_step_survives_the_pipe(outputs: tuple[TokenOutput, ...]) -> None:
    received = pickle.loads(ForkingPickler.dumps(StepOutput(outputs, STATS)))
    assert received == StepOutput(outputs, STATS)
    assert type(received.stats) is EngineStats
    assert all(type(output) is TokenOutput for output in received.outputs)


def test_a_step_of_many_sequences_is_small() -> None:
    """The ids are most of it: 50 bytes for each output, of which 36 are the id's."""
    outputs = tuple(TokenOutput(f"{number:032x}/{number:03}", (30000 + number,)) for number in range(256))
    assert len(ForkingPickler.dumps(StepOutput(outputs, STATS))) < 256 * 50
