"""Restarts without processes: the policy, and the client between an engine that is gone and the next."""

import asyncio
from typing import Any

import pytest

from mmserve.config import EngineConfig, ModelConfig, RopeConfig
from mmserve.engine.client import EngineClient
from mmserve.engine.messages import (
    AbortRequest,
    EngineFailed,
    EngineReady,
    EngineRequest,
    EngineStats,
    Ping,
    Pong,
    StepOutput,
    ToEngine,
    TokenOutput,
)
from mmserve.engine.restarts import RestartPolicy
from mmserve.errors import EngineError, RequestError
from mmserve.request import SamplingParams
from mmserve.weights.dummy import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
READY = EngineReady(max_model_len=77, num_blocks=5, device="cpu", dtype="float32")
GONE = EngineFailed("engine_dead", "gone")
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


class ScriptedProcess:
    """Keeps what is sent; the test says what this engine answers."""

    def __init__(self, _config: EngineConfig, on_message: Any, *, predecessor: Any = None, delay_seconds: float = 0):
        self.sent: list[ToEngine] = []
        self.say = on_message
        self.predecessor = predecessor
        self.delay_seconds = delay_seconds

    def send(self, message: ToEngine) -> None:
        self.sent.append(message)

    def close(self) -> None:
        pass

    def requests(self) -> list[str]:
        return [message.request_id for message in self.sent if isinstance(message, EngineRequest)]


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> EngineClient:
    monkeypatch.setattr("mmserve.engine.client.ProcessTransport", ScriptedProcess)
    made = EngineClient(EngineConfig(use_process=True, max_engine_restarts=2), TOKENIZER, MODEL)
    engine(made).say(READY)
    return made


def engine(client: EngineClient) -> ScriptedProcess:
    assert isinstance(client.transport, ScriptedProcess)
    return client.transport


async def asked(client: EngineClient) -> "asyncio.Task[Any]":
    task = asyncio.create_task(client.complete([1, 2], SamplingParams()))
    await asyncio.sleep(0)
    return task


def test_what_cannot_fit_is_not_sent_to_the_engine(client: EngineClient) -> None:
    with pytest.raises(RequestError) as caught:
        asyncio.run(client.complete([1] * 77, SamplingParams(n=3)))
    assert caught.value.code == "context_length_exceeded"
    assert engine(client).requests() == []


def test_pauses_double_until_there_were_too_many_and_old_ones_are_forgiven() -> None:
    now = 0.0
    policy = RestartPolicy(3, clock=lambda: now)
    assert [policy.next_delay() for _ in range(4)] == [0.5, 1.0, 2.0, None]
    now = 600.0
    assert [policy.next_delay() for _ in range(4)] == [0.5, 1.0, 2.0, None]
    assert RestartPolicy(0).next_delay() is None


def test_a_negative_number_of_restarts_is_refused() -> None:
    with pytest.raises(RequestError, match="--max-engine-restarts"):
        EngineConfig(max_engine_restarts=-1)


def test_what_comes_between_two_engines_is_for_the_second(client: EngineClient) -> None:
    async def scenario() -> None:
        first = engine(client)
        lost = await asked(client)
        first.say(GONE)
        second = engine(client)
        assert (second.predecessor, second.delay_seconds) == (first, 0.5)
        waiting = await asked(client)
        (request_id,) = second.requests()
        with pytest.raises(EngineError, match="gone"):
            await lost
        assert not [message for message in second.sent if isinstance(message, AbortRequest)], "it never knew of it"
        assert client.state == "starting"
        second.say(READY)
        output = TokenOutput(request_id, tuple(TOKENIZER.encode("ok")), finish_reason="stop")
        first.say(StepOutput((output._replace(token_ids=tuple(TOKENIZER.encode("late"))),), EngineStats()))
        second.say(StepOutput((output,), EngineStats()))
        assert (await waiting)[0].text == "ok", "a word from the one that is gone comes too late"

    asyncio.run(scenario())


def test_the_last_word_of_a_process_is_heard_once(client: EngineClient) -> None:
    first = engine(client)
    first.say(EngineFailed("engine_dead", "of an exception"))
    first.say(EngineFailed("engine_dead", "the engine process ended (exit code 0)"))
    first.say(READY)
    assert (client.num_restarts, client.state) == (1, "starting")
    with pytest.raises(EngineError) as caught:
        client.wait_until_ready(0.001)
    assert caught.value.code == "timeout"


def test_who_waits_for_an_engine_to_settle_is_done_when_it_is_gone(client: EngineClient) -> None:
    first = engine(client)
    before = client.settle()
    first.say(GONE)
    assert before.done(), "what is dead reads nothing"
    after = client.settle()
    assert not after.done()
    (ping,) = [message for message in engine(client).sent if isinstance(message, Ping)]
    engine(client).say(Pong(ping.number))
    assert after.done()


def test_an_engine_that_cannot_be_started_again_says_why_at_last(client: EngineClient) -> None:
    async def scenario() -> None:
        for message in ("gone", "no memory"):
            waiting = await asked(client)
            engine(client).say(EngineFailed("insufficient_memory", message))
            with pytest.raises(EngineError, match=message) as caught:
                await waiting
            assert caught.value.code == "engine_dead", "it may be tried again"
        engine(client).say(EngineFailed("insufficient_memory", "none at all"))

    asyncio.run(scenario())
    assert (client.state, client.num_restarts) == ("dead", 2)
    with pytest.raises(Exception, match="none at all"):
        client.wait_until_ready()


def test_closing_is_no_death(client: EngineClient) -> None:
    first = engine(client)
    client.close()
    first.say(GONE)
    assert (client.state, client.num_restarts, client.transport) == ("dead", 0, first)
