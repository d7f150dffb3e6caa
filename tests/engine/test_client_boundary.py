"""The client against a scripted engine: the races and failures that a real one shows only now and then."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from mmserve.config import EngineConfig, ModelConfig, RopeConfig
from mmserve.engine.client import Completion, CompletionDelta, EngineClient, RequestTimings
from mmserve.engine.completion import as_exception
from mmserve.engine.mailbox import Mailbox
from mmserve.engine.messages import (
    AbortRequest,
    EngineFailed,
    EngineReady,
    EngineRequest,
    EngineStats,
    FromEngine,
    RequestFailure,
    StepOutput,
    ToEngine,
    TokenOutput,
)
from mmserve.errors import EngineError, ErrorCode, MMServeError, RequestError, SetupError
from mmserve.request import SamplingParams
from mmserve.weights.dummy import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
READY = EngineReady(max_model_len=77, num_blocks=5, device="cpu", dtype="float32")
MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=256,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    rms_norm_eps=1e-6,
    rope=RopeConfig(),
    max_position_embeddings=100,
)


class ScriptedTransport:
    """Keeps what is sent; the test says what the engine answers, and when."""

    def __init__(self, config: EngineConfig, on_message: Callable[[FromEngine], None]) -> None:
        self.sent: list[ToEngine] = []
        self.say = on_message
        self.is_closed = False

    def send(self, message: ToEngine) -> None:
        self.sent.append(message)

    def close(self) -> None:
        self.is_closed = True

    @property
    def request_ids(self) -> list[str]:
        return [message.request_id for message in self.sent if isinstance(message, EngineRequest)]

    @property
    def aborted_ids(self) -> list[str]:
        return [message.request_id for message in self.sent if isinstance(message, AbortRequest)]

    def answer(self, *outputs: TokenOutput) -> None:
        self.say(StepOutput(outputs, EngineStats()))


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> EngineClient:
    monkeypatch.setattr("mmserve.engine.client.ThreadTransport", ScriptedTransport)
    return EngineClient(EngineConfig(), TOKENIZER, MODEL)


def engine(client: EngineClient) -> ScriptedTransport:
    assert isinstance(client.transport, ScriptedTransport)
    return client.transport


def letters(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text))


async def started(client: EngineClient, count: int = 1, **params: Any) -> "asyncio.Task[list[Completion]]":
    """A request whose `count` sequences have reached the engine."""
    known = len(engine(client).request_ids)
    task = asyncio.create_task(client.complete([1, 2], SamplingParams(**params)))
    await asyncio.sleep(0)
    assert len(engine(client).request_ids) == known + count
    return task


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(10):
            await scenario()

    asyncio.run(limited())


def test_becomes_ready_when_the_engine_says_so(client: EngineClient) -> None:
    assert client.state == "starting"
    assert client.max_model_len == 100
    with pytest.raises(EngineError) as caught:
        client.wait_until_ready(0.001)
    assert caught.value.code == "timeout"
    engine(client).say(READY)
    client.wait_until_ready(0)
    assert (client.state, client.max_model_len, client.engine_info) == ("ready", 77, READY)


def test_requests_may_come_before_the_engine_is_ready(client: EngineClient) -> None:
    async def scenario() -> None:
        task = await started(client)
        engine(client).say(READY)
        engine(client).answer(TokenOutput(engine(client).request_ids[0], letters("ok"), finish_reason="stop"))
        assert (await task)[0].text == "ok"

    run(scenario)


def test_seeds_of_n_follow_each_other(client: EngineClient) -> None:
    async def scenario() -> None:
        task = await started(client, 3, n=3, seed=5)
        sent = engine(client).sent
        assert [message.seed for message in sent if isinstance(message, EngineRequest)] == [5, 6, 7]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(scenario)


def test_what_comes_after_a_stop_string_is_not_shown(client: EngineClient) -> None:
    """The engine may be steps ahead: the second answer keeps the request open while the first one's surplus arrives."""

    async def scenario() -> None:
        stream = client.generate([1], SamplingParams(n=2, stop=("END",)))
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        one, two = engine(client).request_ids
        engine(client).answer(TokenOutput(one, letters("yes END")))
        engine(client).answer(TokenOutput(one, letters("surplus")), TokenOutput(two, letters("no")))
        engine(client).answer(TokenOutput(one, letters("more"), finish_reason="abort"))
        engine(client).answer(TokenOutput(two, letters("!"), finish_reason="length"))
        deltas = [await first, *[delta async for delta in stream]]
        assert [(delta.index, delta.text, delta.finish_reason) for delta in deltas] == [
            (0, "yes ", "stop"),
            (1, "no", None),
            (1, "!", "length"),
        ]
        assert engine(client).aborted_ids == [one]

    run(scenario)


def test_one_refusal_of_n_takes_the_others_along(client: EngineClient) -> None:
    async def scenario() -> None:
        task = await started(client, 2, n=2)
        one, two = engine(client).request_ids
        failure = RequestFailure("queue_full", "try again later")
        engine(client).answer(TokenOutput(two, finish_reason="error", failure=failure))
        with pytest.raises(EngineError, match="try again later"):
            await task
        assert one in engine(client).aborted_ids
        assert not client._mailboxes

    run(scenario)


def test_answers_to_nobody_are_dropped(client: EngineClient) -> None:
    engine(client).answer(TokenOutput("unknown", letters("x"), finish_reason="stop"))
    assert client.state == "starting"


def test_a_dead_engine_fails_everyone_once_and_refuses_the_next(client: EngineClient) -> None:
    timings: list[RequestTimings] = []
    client.observers.append(timings.append)

    async def scenario() -> None:
        tasks = [await started(client), await started(client, 2, n=2)]
        engine(client).answer(TokenOutput(engine(client).request_ids[0], letters("half"), queue_seconds=1.5))
        await asyncio.sleep(0)
        engine(client).say(EngineFailed("engine_dead", "the engine process ended (exit code -9)"))
        engine(client).say(EngineFailed("internal_error", "and again"))
        for task in tasks:
            with pytest.raises(EngineError, match="exit code -9") as caught:
                await task
            assert caught.value.code == "engine_dead"
        with pytest.raises(EngineError, match="exit code -9"):
            await client.complete([1], SamplingParams())

    run(scenario)
    assert client.state == "dead"
    assert [timing.finish_reason for timing in timings] == ["error"] * 3
    assert sorted(timing.queue_seconds for timing in timings) == [0.0, 0.0, 1.5]
    assert engine(client).aborted_ids == []


def test_death_between_the_check_and_the_queue(client: EngineClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine dies after the client looked and before the request was on its books."""
    monkeypatch.setattr(client, "_raise_if_dead", lambda: engine(client).say(EngineFailed("engine_dead", "gone")))

    async def scenario() -> None:
        with pytest.raises(EngineError, match="gone"):
            await client.complete([1], SamplingParams())

    run(scenario)


def test_a_slow_reader_gets_what_came_before_the_failure(client: EngineClient) -> None:
    async def scenario() -> None:
        stream = client.generate([1], SamplingParams())
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        (request_id,) = engine(client).request_ids
        for text in "abc":
            engine(client).answer(TokenOutput(request_id, letters(text)))
        engine(client).say(EngineFailed("engine_dead", "gone"))
        shown = [await first, await anext(stream), await anext(stream)]
        assert [delta.text for delta in shown] == ["a", "b", "c"]
        with pytest.raises(EngineError, match="gone"):
            await anext(stream)

    run(scenario)


def test_each_failure_is_an_error_of_its_own(client: EngineClient) -> None:
    """Two readers that raise one exception object would add to each other's traceback."""

    async def scenario() -> None:
        tasks = [await started(client), await started(client)]
        engine(client).say(EngineFailed("engine_dead", "gone"))
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert errors[0] is not errors[1]

    run(scenario)


def test_close_fails_what_is_in_flight(client: EngineClient) -> None:
    async def scenario() -> None:
        task = await started(client)
        client.close()
        with pytest.raises(EngineError) as caught:
            await task
        assert caught.value.code == "shutting_down"

    run(scenario)
    assert engine(client).is_closed
    assert client.state == "dead"
    client.close()


def test_an_engine_that_cannot_start(client: EngineClient) -> None:
    engine(client).say(EngineFailed("insufficient_memory", "raise --kv-cache-memory-bytes"))
    assert client.state == "dead"
    with pytest.raises(SetupError, match="--kv-cache-memory-bytes"):
        client.wait_until_ready()
    with pytest.raises(SetupError):
        asyncio.run(client.complete([1], SamplingParams()))


def test_a_slow_reader_delays_neither_the_stop_string_nor_the_clock(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    timings: list[RequestTimings] = []
    client.observers.append(timings.append)
    now = 100.0
    monkeypatch.setattr("mmserve.engine.completion.time", SimpleNamespace(monotonic=lambda: now))

    async def scenario() -> None:
        nonlocal now
        stream = client.generate([1, 2], SamplingParams(stop=("cd",), max_tokens=50))
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        (child_id,) = engine(client).request_ids
        engine(client).answer(TokenOutput(child_id, letters("a")))
        assert (await first).text == "a"
        for letter in "bcdefg":
            now += 1.0
            engine(client).answer(TokenOutput(child_id, letters(letter)))
            await asyncio.sleep(0)
        assert engine(client).aborted_ids == [child_id], "nobody has read past the first letter"
        now += 1000.0
        rest = [delta async for delta in stream]
        assert "".join(delta.text for delta in rest) == "b"
        assert (rest[-1].finish_reason, rest[-1].stop_reason) == ("stop", "cd")

    run(scenario)
    (timing,) = timings
    assert timing.e2e_seconds == 3.0
    assert timing.inter_token_latencies == (1.0, 1.0, 1.0)


def test_a_fault_in_an_answer_reaches_its_reader(client: EngineClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down(self: object, output: TokenOutput) -> None:
        raise ZeroDivisionError("detokenizer")

    monkeypatch.setattr("mmserve.engine.completion.AnswerBuilder.push", break_down)

    async def scenario() -> None:
        task = await started(client)
        engine(client).answer(TokenOutput(engine(client).request_ids[0], letters("a")))
        with pytest.raises(ZeroDivisionError):
            await task
        assert engine(client).aborted_ids == engine(client).request_ids

    run(scenario)


def test_a_reader_that_is_gone_with_its_loop(client: EngineClient) -> None:
    loop = asyncio.new_event_loop()
    client._open(["gone/0"], Mailbox("gone", loop, {}, client._close))
    loop.close()
    engine(client).answer(TokenOutput("gone/0", letters("x")))
    engine(client).say(EngineFailed("engine_dead", "gone"))
    assert client.state == "dead"


def test_queue_time_and_cached_tokens_survive_an_abort(client: EngineClient) -> None:
    timings: list[RequestTimings] = []
    client.observers.append(timings.append)

    async def scenario() -> None:
        task = await started(client)
        (request_id,) = engine(client).request_ids
        engine(client).answer(TokenOutput(request_id, letters("a"), num_cached_tokens=16, queue_seconds=2.0))
        engine(client).answer(TokenOutput(request_id, finish_reason="abort"))
        (completion,) = await task
        assert (completion.finish_reason, completion.num_cached_tokens) == ("abort", 16)

    run(scenario)
    assert [(timing.queue_seconds, timing.finish_reason) for timing in timings] == [(2.0, "abort")]


def test_held_back_text_is_shown_at_the_end(client: EngineClient) -> None:
    async def scenario() -> None:
        deltas: list[CompletionDelta] = []
        stream = client.generate([1], SamplingParams(stop=("STOP",)))
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        (request_id,) = engine(client).request_ids
        engine(client).answer(TokenOutput(request_id, letters("go STO")))
        engine(client).answer(TokenOutput(request_id, letters("O"), finish_reason="length"))
        deltas = [await first, *[delta async for delta in stream]]
        assert [delta.text for delta in deltas] == ["go ", "STOO"]

    run(scenario)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("invalid_request", RequestError),
        ("context_length_exceeded", RequestError),
        ("queue_full", EngineError),
        ("engine_dead", EngineError),
        ("shutting_down", EngineError),
        ("timeout", EngineError),
        ("internal_error", EngineError),
        ("model_unavailable", SetupError),
        ("missing_dependency", SetupError),
        ("insufficient_memory", SetupError),
    ],
)
def test_the_code_decides_the_branch_of_the_tree(code: ErrorCode, kind: type[MMServeError]) -> None:
    error = as_exception(RequestFailure(code, "why", "field"))
    assert type(error) is kind
    assert (error.code, error.message, error.param) == (code, "why", "field")
