"""The client with a real engine in a thread: answers, aborts, refusals, stops, seeds."""

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any

import pytest
from engine_driver import engine_config, greedy
from reference_models import VOCAB_SIZE, save_reference_model

from mmserve.engine.client import Completion, CompletionDelta, EngineClient, RequestTimings
from mmserve.engine.messages import AbortRequest, EngineStats, ToEngine
from mmserve.errors import MMServeError, RequestError
from mmserve.request import SamplingParams

PROMPT = [11, 52, 93, 134, 175, 216]
LONG = greedy(400)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineClient]:
    folder = save_reference_model("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=1)
    client = EngineClient.start(engine_config(folder, max_num_waiting=1000))
    client.wait_until_ready(60)
    yield client
    client.close()


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(client: EngineClient) -> Iterator[None]:
    yield
    wait_until_idle(client)
    assert not client._mailboxes
    assert not client._requests


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.0005)


def wait_until_idle(client: EngineClient) -> None:
    def is_idle(stats: EngineStats) -> bool:
        return stats.num_requests_running + stats.num_requests_waiting == 0 and stats.kv_cache_usage_ratio == 0.0

    wait_until(lambda: is_idle(client.stats))


def complete(client: EngineClient, prompt: list[int], params: SamplingParams) -> list[Completion]:
    return asyncio.run(client.complete(prompt, params))


def tokens(client: EngineClient, prompt: list[int], params: SamplingParams) -> list[int]:
    return list(complete(client, prompt, params)[0].token_ids)


def observed(client: EngineClient, monkeypatch: pytest.MonkeyPatch) -> list[RequestTimings]:
    timings: list[RequestTimings] = []
    monkeypatch.setattr(client, "observers", [timings.append])
    return timings


def spied(client: EngineClient, monkeypatch: pytest.MonkeyPatch) -> list[ToEngine]:
    """Every message to the engine from now on."""
    sent: list[ToEngine] = []
    send = client.transport.send

    def send_and_keep(message: ToEngine) -> None:
        sent.append(message)
        send(message)

    monkeypatch.setattr(client.transport, "send", send_and_keep)
    return sent


async def running(client: EngineClient, count: int) -> None:
    """Until the engine works on `count` sequences."""
    await asyncio.to_thread(wait_until, lambda: client.stats.num_requests_running == count)


async def first_deltas(stream: AsyncGenerator[CompletionDelta, None], count: int) -> list[CompletionDelta]:
    return [await anext(stream) for _ in range(count)]


def test_state_and_what_the_engine_says_of_itself(client: EngineClient) -> None:
    assert client.state == "ready"
    assert client.engine_info is not None
    assert client.engine_info.num_blocks == 256
    assert (client.engine_info.device, client.engine_info.dtype) == ("cpu", "float32")
    assert client.max_model_len == client.engine_info.max_model_len == 512


def test_deltas_add_up_to_the_completion(client: EngineClient) -> None:
    async def collect() -> list[CompletionDelta]:
        return [delta async for delta in client.generate(PROMPT, greedy(12))]

    deltas = asyncio.run(collect())
    (completion,) = complete(client, PROMPT, greedy(12))
    assert "".join(delta.text for delta in deltas) == completion.text
    assert sum((delta.token_ids for delta in deltas), ()) == completion.token_ids
    assert [delta.finish_reason for delta in deltas] == [None] * 11 + ["length"]
    assert completion.text == client.tokenizer.decode(completion.token_ids)
    assert (completion.num_prompt_tokens, completion.finish_reason, completion.stop_reason) == (6, "length", None)


def test_without_detokenizing_there_are_ids_and_no_text(client: EngineClient) -> None:
    (whole,) = complete(client, PROMPT, greedy(12))
    (bare,) = complete(client, PROMPT, greedy(12, detokenize=False))
    assert (bare.text, bare.token_ids, bare.finish_reason) == ("", whole.token_ids, "length")
    stopped = greedy(12, detokenize=False, stop_token_ids=(whole.token_ids[0],))
    (completion,) = complete(client, PROMPT, stopped)
    assert (completion.token_ids, completion.stop_reason) == (whole.token_ids[:1], whole.token_ids[0])


def test_n_answers_in_order(client: EngineClient) -> None:
    completions = complete(client, PROMPT, greedy(8, n=3))
    assert [completion.index for completion in completions] == [0, 1, 2]
    assert len({completion.token_ids for completion in completions}) == 1
    random = complete(client, PROMPT, SamplingParams(n=3, max_tokens=8, seed=5, ignore_eos=True))
    assert len({completion.token_ids for completion in random}) == 3
    assert all(completion.finish_reason == "length" for completion in random)


def test_a_seed_gives_the_same_answer_alone_and_among_others(client: EngineClient) -> None:
    seeded = SamplingParams(max_tokens=10, seed=42, ignore_eos=True)

    async def among_others() -> list[int]:
        others = [client.complete([i, *PROMPT], SamplingParams(max_tokens=10 + i, n=2)) for i in range(3, 8)]
        answers = await asyncio.gather(client.complete(PROMPT, seeded), *others)
        return list(answers[0][0].token_ids)

    alone = tokens(client, PROMPT, seeded)
    assert asyncio.run(among_others()) == alone
    assert tokens(client, PROMPT, SamplingParams(max_tokens=10, seed=43, ignore_eos=True)) != alone


def test_without_a_seed_answers_differ(client: EngineClient) -> None:
    free = SamplingParams(max_tokens=16, ignore_eos=True)
    assert tokens(client, PROMPT, free) != tokens(client, PROMPT, free)


def test_logprobs_come_with_their_tokens(client: EngineClient) -> None:
    (completion,) = complete(client, PROMPT, greedy(5, logprobs=2))
    assert [logprob.token_id for logprob in completion.logprobs] == list(completion.token_ids)
    assert all(len(logprob.top) == 2 and logprob.top[0][0] == logprob.token_id for logprob in completion.logprobs)


def test_a_repeated_prompt_says_how_much_was_cached(client: EngineClient) -> None:
    prompt = [(7 * i) % 390 + 3 for i in range(40)]
    assert complete(client, prompt, greedy(2))[0].num_cached_tokens == 0
    assert complete(client, prompt, greedy(2))[0].num_cached_tokens == 32


# Leaving early


def test_abort_by_id_ends_the_answer(client: EngineClient) -> None:
    async def scenario() -> list[CompletionDelta]:
        stream = client.generate(PROMPT, LONG, request_id="mine")
        deltas = await first_deltas(stream, 2)
        client.abort("mine")
        return deltas + [delta async for delta in stream]

    deltas = asyncio.run(scenario())
    assert deltas[-1].finish_reason == "abort"
    assert deltas[-1].token_ids == ()
    assert 2 <= len(deltas) < 400


def test_abort_ends_all_of_n_and_nobody_else(client: EngineClient) -> None:
    async def scenario() -> tuple[list[Completion], list[Completion]]:
        mine = asyncio.create_task(client.complete(PROMPT, greedy(400, n=2), request_id="a/0"))
        other = asyncio.create_task(client.complete(PROMPT, greedy(200), request_id="a"))
        await running(client, 3)
        client.abort("a/0")
        client.abort("unknown")
        return await mine, await other

    mine, other = asyncio.run(scenario())
    assert [completion.finish_reason for completion in mine] == ["abort", "abort"]
    assert other[0].finish_reason == "length"


def test_abort_from_another_thread(client: EngineClient) -> None:
    async def scenario() -> Completion:
        task = asyncio.create_task(client.complete(PROMPT, LONG, request_id="mine"))
        await running(client, 1)
        thread = threading.Thread(target=client.abort, args=("mine",))
        thread.start()
        return (await task)[0]

    assert asyncio.run(scenario()).finish_reason == "abort"


def test_leaving_the_iterator_frees_the_engine(client: EngineClient, monkeypatch: pytest.MonkeyPatch) -> None:
    sent, timings = spied(client, monkeypatch), observed(client, monkeypatch)

    async def scenario() -> None:
        async with aclosing(client.generate(PROMPT, greedy(400, n=2))) as stream:
            await first_deltas(stream, 4)

    asyncio.run(scenario())
    assert sum(isinstance(message, AbortRequest) for message in sent) == 2
    assert [timing.finish_reason for timing in timings] == ["abort", "abort"]
    wait_until_idle(client)


def test_breaking_out_of_the_loop_is_enough(client: EngineClient, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = spied(client, monkeypatch)

    async def scenario() -> None:
        async for _ in client.generate(PROMPT, LONG):
            break
        await asyncio.to_thread(wait_until, lambda: not client._mailboxes)

    asyncio.run(scenario())
    assert any(isinstance(message, AbortRequest) for message in sent)


def test_cancelling_the_task_frees_the_engine(client: EngineClient, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = spied(client, monkeypatch)

    async def scenario() -> None:
        task = asyncio.create_task(client.complete(PROMPT, LONG))
        await running(client, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    assert any(isinstance(message, AbortRequest) for message in sent)


def test_settle_waits_until_aborts_have_taken_effect(client: EngineClient) -> None:
    async def leave() -> None:
        async with aclosing(client.generate(PROMPT, greedy(400))) as deltas:
            await anext(deltas)
        await asyncio.wrap_future(client.settle())
        assert client.stats.num_requests_running == 0

    asyncio.run(leave())
    assert not client._settling


def test_who_gives_up_on_settle_hurts_nobody(client: EngineClient) -> None:
    async def give_up() -> None:
        waiting = asyncio.wrap_future(client.settle())
        waiting.cancel()
        await asyncio.wrap_future(client.settle())

    asyncio.run(give_up())
    assert not client.settle().cancel()
    assert len(tokens(client, PROMPT, greedy(3))) == 3


def test_only_requests_of_one_salt_share_a_prefix(client: EngineClient) -> None:
    prompt = [7 + i % 50 for i in range(64)]

    async def ask(salt: bytes) -> tuple[int, tuple[int, ...]]:
        deltas = [delta async for delta in client.generate(prompt, greedy(4), cache_salt=salt)]
        return deltas[0].num_cached_tokens, tuple(token for delta in deltas for token in delta.token_ids)

    async def scenario() -> list[tuple[int, tuple[int, ...]]]:
        return [await ask(salt) for salt in (b"a", b"b", b"", b"a", b"b", b"")]

    answers = asyncio.run(scenario())
    assert [num_cached for num_cached, _ in answers] == [0, 0, 0, 48, 48, 48]
    assert len({token_ids for _, token_ids in answers}) == 1


def test_a_loop_that_ends_in_the_middle_does_not_hurt(client: EngineClient) -> None:
    """Its mailbox cannot be reached any more; asyncio.run closes the generator on the way out."""
    loop = asyncio.new_event_loop()
    stream = client.generate(PROMPT, LONG)
    loop.run_until_complete(anext(stream))
    wait_until(lambda: client.stats.num_requests_running == 1)
    loop.run_until_complete(stream.aclose())
    loop.close()
    assert len(tokens(client, PROMPT, greedy(3))) == 3


# Refusals


@pytest.mark.parametrize(
    ("prompt", "params", "code"),
    [
        ([], greedy(1), "invalid_request"),
        ([1, VOCAB_SIZE], greedy(1), "invalid_request"),
        ([1, -1], greedy(1), "invalid_request"),
        ([1, 2**70], greedy(1), "invalid_request"),
        (["1"], greedy(1), "invalid_request"),
        ([1.5], greedy(1), "invalid_request"),
        ([1], greedy(1, stop_token_ids=(VOCAB_SIZE,)), "invalid_request"),
        ([1], greedy(1, logit_bias={VOCAB_SIZE: 1.0}), "invalid_request"),
        ([1] * 512, greedy(1), "context_length_exceeded"),
        ([1] * 600, SamplingParams(), "context_length_exceeded"),
        ([1] * 500, greedy(13), "context_length_exceeded"),
        ([1] * 500, greedy(13, n=3), "context_length_exceeded"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_refusal_hits_its_sender_alone(client: EngineClient, prompt: Any, params: SamplingParams, code: str) -> None:
    async def scenario() -> tuple[MMServeError, list[int]]:
        neighbour = asyncio.create_task(client.complete(PROMPT, greedy(40)))
        await running(client, 1)
        with pytest.raises(MMServeError) as caught:
            await client.complete(prompt, params)
        return caught.value, list((await neighbour)[0].token_ids)

    error, answer = asyncio.run(scenario())
    assert error.code == code
    assert isinstance(error, RequestError)
    assert answer == tokens(client, PROMPT, greedy(40))
    assert client.state == "ready"


def test_a_refused_request_counts_as_an_error(client: EngineClient, monkeypatch: pytest.MonkeyPatch) -> None:
    timings = observed(client, monkeypatch)
    with pytest.raises(RequestError):
        complete(client, [1] * 600, greedy(1, n=2))
    assert [timing.finish_reason for timing in timings] == ["error", "error"]


def test_an_id_in_use_is_refused_and_free_again_afterwards(client: EngineClient) -> None:
    async def scenario() -> list[int]:
        first = asyncio.create_task(client.complete(PROMPT, greedy(40), request_id="mine"))
        await running(client, 1)
        with pytest.raises(RequestError) as caught:
            await client.complete(PROMPT, greedy(2), request_id="mine")
        assert caught.value.param == "request_id"
        await first
        return list((await client.complete(PROMPT, greedy(2), request_id="mine"))[0].token_ids)

    assert asyncio.run(scenario()) == tokens(client, PROMPT, greedy(2))


def test_an_id_used_again_at_once_gets_its_own_answer(client: EngineClient) -> None:
    """What the engine still has to say about the abandoned request must not reach the new one."""

    async def scenario() -> list[int]:
        stream = client.generate([9, 8, 7], LONG, request_id="mine")
        await anext(stream)
        await stream.aclose()
        return list((await client.complete(PROMPT, greedy(10), request_id="mine"))[0].token_ids)

    assert asyncio.run(scenario()) == tokens(client, PROMPT, greedy(10))


# Stops


def test_a_stop_string_over_two_tokens_ends_generation(client: EngineClient, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = complete(client, PROMPT, greedy(60))[0]
    stop, before = crossing_stop(client, list(whole.token_ids))
    sent = spied(client, monkeypatch)
    (completion,) = complete(client, PROMPT, greedy(400, stop=(stop,)))
    assert completion.text == before
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert len(completion.token_ids) < 60
    assert any(isinstance(message, AbortRequest) for message in sent)


def crossing_stop(client: EngineClient, token_ids: list[int]) -> tuple[str, str]:
    """The last character of one token and the first of the next, and the text before them: their first occurrence."""
    text = client.tokenizer.decode(token_ids)
    parts = [client.tokenizer.decode([token_id]) for token_id in token_ids]
    for left, right in itertools.pairwise(parts[2:]):
        stop = left[-1:] + right[:1]
        if len(stop) == 2 and stop.isascii() and stop.isprintable() and not any(stop in part for part in parts):
            return stop, text[: text.index(stop)]
    raise AssertionError("this model's answer has no two plain tokens in a row")


def test_a_stop_token_is_named_and_not_shown(client: EngineClient) -> None:
    whole = complete(client, PROMPT, greedy(20))[0].token_ids
    position = next(i for i in range(3, 20) if whole[i] not in whole[:i])
    params = greedy(20, stop_token_ids=(whole[position],))
    (completion,) = complete(client, PROMPT, params)
    assert completion.token_ids == whole[: position + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", whole[position])
    assert completion.text == client.tokenizer.decode(whole[:position])
    shown = greedy(20, stop_token_ids=(whole[position],), include_stop_str_in_output=True)
    assert complete(client, PROMPT, shown)[0].text == client.tokenizer.decode(whole[: position + 1])


def test_the_end_of_sequence_has_no_stop_reason(client: EngineClient) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=9, logit_bias={2: 100.0}, min_tokens=4)
    (completion,) = complete(client, PROMPT, params)
    assert (len(completion.token_ids), completion.token_ids[-1]) == (5, 2)
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)


# Many at once


def test_event_loops_in_many_threads(client: EngineClient) -> None:
    prompts = [[i, *PROMPT] for i in range(3, 9)]
    alone = [tokens(client, prompt, greedy(12)) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(lambda prompt: tokens(client, prompt, greedy(12)), prompts)) == alone


def test_more_requests_than_seats(client: EngineClient) -> None:
    async def scenario() -> list[list[Completion]]:
        return await asyncio.gather(*(client.complete([3 + i % 50, *PROMPT], greedy(2)) for i in range(150)))

    answers = asyncio.run(scenario())
    assert [len(answer[0].token_ids) for answer in answers] == [2] * 150
    assert answers[0][0].token_ids == answers[50][0].token_ids == answers[100][0].token_ids


def test_timings_of_a_finished_answer(client: EngineClient, monkeypatch: pytest.MonkeyPatch) -> None:
    timings = observed(client, monkeypatch)
    started = time.monotonic()
    complete(client, PROMPT, greedy(6))
    elapsed = time.monotonic() - started
    (timing,) = timings
    assert (timing.num_prompt_tokens, timing.num_output_tokens, timing.finish_reason) == (6, 6, "length")
    assert timing.time_to_first_token is not None
    assert 0.0 <= timing.queue_seconds <= timing.time_to_first_token <= timing.e2e_seconds <= elapsed
    assert len(timing.inter_token_latencies) == 5
    assert timing.time_to_first_token + sum(timing.inter_token_latencies) <= timing.e2e_seconds
