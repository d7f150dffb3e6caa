"""An engine process that dies is replaced: what it worked on fails, what comes afterwards is served."""

import asyncio
import io
import logging
import os
import signal
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_driver import engine_config, greedy
from PIL import Image
from reference_models import save_reference_model
from vision_checkpoint import picture_bytes, save_vision_model

from mmserve.config import EngineConfig
from mmserve.engine.client import CompletionDelta, EngineClient
from mmserve.engine.prompt_builder import BuiltPrompt, PromptBuilder
from mmserve.engine.prompt_factory import open_prompts
from mmserve.engine.transport import ProcessTransport
from mmserve.errors import EngineError
from mmserve.request import PatchesRef
from mmserve.vision.decoded_picture import DecodedPicture

PROMPT = [11, 52, 93, 134, 175, 216]
START_SECONDS = 120.0
SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reference_model("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=1)


@contextmanager
def started(config: EngineConfig, **settings: Any) -> Iterator[EngineClient]:
    client = EngineClient.start(replace(config, use_process=True, **settings))
    try:
        yield client
    finally:
        client.close()


def process_of(client: EngineClient) -> int:
    """The process' id, as soon as there is one."""
    transport = client.transport
    assert isinstance(transport, ProcessTransport)
    wait_until(lambda: transport.pid is not None)
    assert transport.pid is not None
    return transport.pid


def kill(client: EngineClient) -> None:
    os.kill(process_of(client), signal.SIGKILL)


def kill_and_wait_for_the_next(client: EngineClient) -> None:
    """Until there is another process, which has hardly begun to load."""
    before = client.transport
    kill(client)
    wait_until(lambda: client.transport is not before)
    process_of(client)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)


async def lost_request(client: EngineClient, end: Callable[[EngineClient], None]) -> EngineError:
    """What a request in the middle of its answer gets when `end` has come over its engine."""
    stream = client.generate(PROMPT, greedy(500))
    await anext(stream)
    await asyncio.to_thread(end, client)
    return await error_of(stream)


async def error_of(stream: AsyncGenerator[CompletionDelta, None]) -> EngineError:
    async with asyncio.timeout(START_SECONDS):
        with pytest.raises(EngineError) as caught:
            await anext(delta async for delta in stream if delta.finish_reason is not None)
    return caught.value


def answer(client: EngineClient) -> tuple[int, ...]:
    return asyncio.run(client.complete(PROMPT, greedy(20)))[0].token_ids


def test_killed_again_and_again_it_is_replaced_until_it_is_too_often(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), started(engine_config(folder), max_engine_restarts=2) as client:
        expected = answer(client)
        for num_restarts in (1, 2):
            error = asyncio.run(lost_request(client, kill))
            assert (error.code, error.http_status) == ("engine_dead", 503)
            assert (client.state, client.num_restarts) == ("starting", num_restarts)
            assert client.stats.num_requests_running == 0
            assert answer(client) == expected, "a request that comes meanwhile waits for the new engine"
            assert client.state == "ready"
        assert asyncio.run(lost_request(client, kill)).code == "engine_dead"
        assert (client.state, client.num_restarts) == ("dead", 2)
        with pytest.raises(EngineError, match="-9"):
            answer(client)
        with pytest.raises(EngineError, match="-9"):
            client.wait_until_ready(0)
    said = [record.getMessage() for record in caplog.records if record.name == "mmserve.engine.client"]
    assert [line.partition("; ")[2] or line for line in said] == [
        "it is started again in 0.5 seconds",
        "the engine is ready again",
        "it is started again in 1 seconds",
        "the engine is ready again",
        "it is not started again",
    ]


def test_killed_while_it_is_started_again_it_is_tried_once_more(folder: Path) -> None:
    with started(engine_config(folder)) as client:
        expected = answer(client)
        kill_and_wait_for_the_next(client)
        kill_and_wait_for_the_next(client)
        assert answer(client) == expected
        assert client.num_restarts == 2


def test_what_waits_for_an_engine_that_dies_while_it_is_started_is_told(folder: Path) -> None:
    async def scenario(client: EngineClient) -> str:
        await client.complete(PROMPT, greedy(1))
        await asyncio.to_thread(kill_and_wait_for_the_next, client)
        waiting = asyncio.create_task(client.complete(PROMPT, greedy(1)))
        await asyncio.to_thread(kill, client)
        with pytest.raises(EngineError) as caught:
            await waiting
        return caught.value.code

    with started(engine_config(folder)) as client:
        assert asyncio.run(scenario(client)) == "engine_dead"


def test_killed_while_it_loads_for_the_first_time_it_stays_dead(folder: Path) -> None:
    with started(engine_config(folder)) as client:
        kill(client)
        with pytest.raises(EngineError, match="-9"):
            client.wait_until_ready(START_SECONDS)
        assert (client.state, client.num_restarts) == ("dead", 0)


def test_a_process_that_dies_of_an_exception_is_replaced(folder: Path) -> None:
    def confuse(client: EngineClient) -> None:
        message: Any = "no message at all"
        client.transport.send(message)

    with started(engine_config(folder)) as client:
        expected = answer(client)
        first = process_of(client)
        error = asyncio.run(lost_request(client, confuse))
        assert (error.code, "internal error" in error.message) == ("engine_dead", True)
        assert answer(client) == expected
        assert client.num_restarts == 1
        assert not Path(f"/proc/{first}").exists(), "the memory of both would have to be there"


def test_one_that_hangs_is_killed_and_replaced(folder: Path) -> None:
    def stop(client: EngineClient) -> None:
        os.kill(process_of(client), signal.SIGSTOP)

    with started(engine_config(folder), engine_timeout=2.0) as client:
        expected = answer(client)
        error = asyncio.run(lost_request(client, stop))
        assert (error.code, "no sign of life for 2 seconds" in error.message) == ("engine_dead", True)
        assert answer(client) == expected
        assert client.num_restarts == 1


def test_who_sends_to_one_that_hangs_does_not_wait_for_it(folder: Path) -> None:
    async def ask(client: EngineClient) -> None:
        asking = [asyncio.create_task(client.complete([11] * 400, greedy(1, n=100))) for _ in range(10)]
        await asyncio.sleep(0)
        assert (client.num_restarts, client.state) == (0, "ready"), "it was killed before the messages were gone"
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    with started(engine_config(folder), engine_timeout=20.0) as client:
        client.wait_until_ready(START_SECONDS)
        process = process_of(client)
        os.kill(process, signal.SIGSTOP)
        asyncio.run(ask(client))
        os.kill(process, signal.SIGCONT)


def test_one_that_has_nothing_to_do_gives_signs_of_life(folder: Path) -> None:
    with started(engine_config(folder), engine_timeout=1.0) as client:
        client.wait_until_ready(START_SECONDS)
        first = process_of(client)
        time.sleep(3.0)
        answer(client)
        assert (client.num_restarts, process_of(client)) == (0, first)


def test_closing_between_two_engines_starts_no_other(folder: Path) -> None:
    with started(engine_config(folder)) as client:
        client.wait_until_ready(START_SECONDS)
        before = client.transport
        kill(client)
        wait_until(lambda: client.transport is not before)
        client.close()
        transport = client.transport
        assert isinstance(transport, ProcessTransport)
        assert transport.pid is None
        assert client.state == "dead"
        with pytest.raises(EngineError) as caught:
            answer(client)
        assert caught.value.code == "shutting_down"


# Pictures


@pytest.fixture(scope="module")
def vision_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_model(tmp_path_factory.mktemp("vision"))


def picture_message(seed: int) -> list[dict[str, Any]]:
    picture = DecodedPicture(Image.open(io.BytesIO(picture_bytes(seed))))
    return [{"role": "user", "content": [{"type": "image", "source": picture}, {"type": "text", "text": "a"}]}]


def patches_of(prompt: BuiltPrompt) -> list[PatchesRef]:
    return [image.patches for image in prompt.images if image.patches is not None]


@pytest.mark.parametrize("pixels_on", ["worker", "device"])
def test_pictures_under_way_outlive_the_engine_and_leave_nothing_behind(vision_folder: Path, pixels_on: Any) -> None:
    config = engine_config(vision_folder)
    config = replace(config, vision=replace(config.vision, pixels_on=pixels_on))
    segments: list[Path] = []

    async def ask(client: EngineClient, prompts: PromptBuilder, num_tokens: int) -> tuple[int, ...]:
        async with prompts.build(picture_message(1)) as prompt:
            return (await client.complete(prompt.token_ids, greedy(num_tokens), images=prompt.images))[0].token_ids

    async def scenario(client: EngineClient, prompts: PromptBuilder) -> None:
        expected = await ask(client, prompts, 8)
        async with prompts.build(picture_message(1)) as held, prompts.build(picture_message(2)) as other:
            segments.extend(SHARED_MEMORY / ref.segment for ref in patches_of(held) + patches_of(other))
            stream = client.generate(other.token_ids, greedy(200), images=other.images)
            await anext(stream)
            await asyncio.to_thread(kill, client)
            assert (await error_of(stream)).code == "engine_dead"
            async with asyncio.timeout(START_SECONDS):
                await asyncio.wrap_future(client.settle())
            assert all(path.exists() for path in segments)
            after = (await client.complete(held.token_ids, greedy(8), images=held.images))[0].token_ids
        assert after == expected, "what was held lies where it lay"
        assert await ask(client, prompts, 8) == expected
        assert prompts.pool is not None
        assert prompts.pool.num_pinned == 0

    with started(config) as client, closing(open_prompts(client, num_workers=1)) as prompts:
        asyncio.run(scenario(client, prompts))
    assert segments
    assert not [path for path in segments if path.exists()]
