"""Engines that die, cannot start, or live in a process of their own."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from engine_driver import engine_config, greedy
from reference_models import save_reference_model

from mmserve.config import CacheConfig, EngineConfig
from mmserve.engine.client import EngineClient, RequestTimings
from mmserve.engine.engine import Engine
from mmserve.engine.messages import StepOutput
from mmserve.engine.transport import ProcessTransport
from mmserve.errors import EngineError, RequestError, SetupError
from mmserve.request import SamplingParams

PROMPT = [11, 52, 93, 134, 175, 216]
START_SECONDS = 120.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reference_model("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=1)


@contextmanager
def started(config: EngineConfig) -> Iterator[EngineClient]:
    client = EngineClient.start(config)
    try:
        yield client
    finally:
        client.close()


async def running(client: EngineClient, count: int) -> None:
    """Until the engine works on `count` sequences."""
    await asyncio.to_thread(_wait_until, lambda: client.stats.num_requests_running == count)


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.0005)


async def fails_in_flight(client: EngineClient, end: Callable[[], object]) -> list[BaseException]:
    """What two requests in the middle of their answers get when `end` is called, and the seconds that it takes."""
    tasks = [asyncio.create_task(client.complete([i, *PROMPT], greedy(480))) for i in (3, 4)]
    await running(client, 2)
    await asyncio.to_thread(end)
    async with asyncio.timeout(10):
        results = await asyncio.gather(*tasks, return_exceptions=True)
    return [result for result in results if isinstance(result, BaseException)]


def codes(errors: list[BaseException]) -> list[str]:
    assert all(isinstance(error, EngineError) for error in errors), errors
    return [error.code for error in errors if isinstance(error, EngineError)]


# In a thread


def test_close_fails_what_is_in_flight(folder: Path) -> None:
    with started(engine_config(folder)) as client:
        client.wait_until_ready(START_SECONDS)
        assert codes(asyncio.run(fails_in_flight(client, client.close))) == ["shutting_down"] * 2
        with pytest.raises(EngineError) as caught:
            asyncio.run(client.complete(PROMPT, greedy(1)))
        assert caught.value.code == "shutting_down"
        assert client.state == "dead"
        assert client.settle().done()


def test_an_exception_in_a_step_is_told_to_everybody_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_broken: list[bool] = []
    step = Engine.step

    def breaking_step(engine: Engine) -> StepOutput:
        # A request's own error must not pass for its fault when it comes out of a step.
        if is_broken:
            raise RequestError("invalid_request", "out of a step")
        return step(engine)

    monkeypatch.setattr(Engine, "step", breaking_step)
    timings: list[RequestTimings] = []
    with started(engine_config(folder)) as client:
        client.wait_until_ready(START_SECONDS)
        client.observers.append(timings.append)
        assert codes(asyncio.run(fails_in_flight(client, lambda: is_broken.append(True)))) == ["engine_dead"] * 2
        assert client.state == "dead"
        assert (client.stats.num_requests_running, client.stats.kv_cache_usage_ratio) == (0, 0.0)
        with pytest.raises(EngineError) as caught:
            asyncio.run(client.complete(PROMPT, greedy(1)))
        assert caught.value.code == "engine_dead"
        with pytest.raises(EngineError):
            client.wait_until_ready(0)
    assert [timing.finish_reason for timing in timings] == ["error", "error"]


def test_requests_may_come_while_the_engine_loads(folder: Path) -> None:
    with started(engine_config(folder)) as client:
        (completion,) = asyncio.run(client.complete(PROMPT, greedy(3)))
        assert len(completion.token_ids) == 3
        assert client.state == "ready"


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(SetupError) as caught:
        EngineClient.start(EngineConfig(model=str(tmp_path)))
    assert caught.value.code == "model_unavailable"
    assert str(tmp_path) in str(caught.value)


@pytest.fixture(scope="module")
def incomplete(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose configuration asks for a layer that the weights do not have."""
    copy = tmp_path_factory.mktemp("incomplete")
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    config = copy / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 1', '"num_hidden_layers": 2'))
    return copy


@pytest.mark.parametrize("use_process", [False, True], ids=["thread", "process"])
def test_a_missing_weight_is_named(folder: Path, incomplete: Path, use_process: bool) -> None:
    config = replace(engine_config(folder), model=str(incomplete), use_process=use_process)
    with started(config) as client:
        with pytest.raises(SetupError, match=r"model\.layers\.1\.") as caught:
            client.wait_until_ready(START_SECONDS)
        assert caught.value.code == "model_unavailable"
        assert client.state == "dead"
        with pytest.raises(SetupError, match=r"model\.layers\.1\."):
            asyncio.run(client.complete(PROMPT, greedy(1)))


def test_a_cache_too_small_for_the_context_asked_for(folder: Path) -> None:
    config = replace(engine_config(folder, num_blocks=4), max_model_len=128)
    with started(config) as client:
        with pytest.raises(SetupError, match="--kv-cache-memory-bytes") as caught:
            client.wait_until_ready(START_SECONDS)
        assert caught.value.code == "insufficient_memory"
        assert client.state == "dead"


def test_a_small_cache_bounds_a_context_that_nobody_asked_for(folder: Path) -> None:
    with started(engine_config(folder, num_blocks=4)) as client:
        client.wait_until_ready(START_SECONDS)
        assert client.max_model_len == 64
        (completion,) = asyncio.run(client.complete(PROMPT, SamplingParams(temperature=0.0, ignore_eos=True)))
        assert len(completion.token_ids) == 64 - len(PROMPT)


def test_memory_that_this_machine_does_not_have(folder: Path) -> None:
    config = replace(engine_config(folder), cache=CacheConfig(memory_bytes=2**60))
    with started(config) as client:
        with pytest.raises(SetupError, match="--kv-cache-memory-bytes") as caught:
            client.wait_until_ready(START_SECONDS)
        assert caught.value.code == "insufficient_memory"


# In a process


def test_a_process_serves_aborts_refuses_and_dies(folder: Path) -> None:
    """One process for the whole life of an engine, since starting one takes seconds."""
    with started(engine_config(folder)) as thread:
        expected = asyncio.run(thread.complete(PROMPT, greedy(20)))[0].token_ids
    timings: list[RequestTimings] = []
    with started(replace(engine_config(folder), use_process=True, max_engine_restarts=0)) as client:
        client.wait_until_ready(START_SECONDS)
        client.observers.append(timings.append)
        assert client.max_model_len == 512
        asyncio.run(_serves_aborts_and_refuses(client, expected))
        timings.clear()
        assert isinstance(client.transport, ProcessTransport)
        pid = client.transport.pid
        assert pid is not None
        assert codes(asyncio.run(fails_in_flight(client, lambda: os.kill(pid, signal.SIGKILL)))) == ["engine_dead"] * 2
        assert client.state == "dead"
        with pytest.raises(EngineError, match="-9") as caught:
            asyncio.run(client.complete(PROMPT, greedy(1)))
        assert caught.value.code == "engine_dead"
    assert [timing.finish_reason for timing in timings] == ["error", "error"]


async def _serves_aborts_and_refuses(client: EngineClient, expected: tuple[int, ...]) -> None:
    neighbour = asyncio.create_task(client.complete(PROMPT, greedy(20)))
    aborted = asyncio.create_task(client.complete(PROMPT, greedy(480), request_id="mine"))
    with pytest.raises(RequestError) as caught:
        await client.complete([1] * 600, greedy(1))
    assert caught.value.code == "context_length_exceeded"
    await asyncio.sleep(0)
    client.abort("mine")
    assert (await neighbour)[0].token_ids == expected
    assert (await aborted)[0].finish_reason == "abort"
    await running(client, 0)
    assert client.stats.kv_cache_usage_ratio == 0.0


SCRIPT = """
import sys
from dataclasses import replace
from pathlib import Path
from engine_driver import engine_config
from mmserve.engine.client import EngineClient

if __name__ == "__main__":
    client = EngineClient.start(replace(engine_config(Path(sys.argv[1])), use_process=True))
    client.wait_until_ready(120)
    print(client.transport.pid, flush=True)
    raise SystemExit(7)
"""


def test_a_program_that_forgets_to_close_ends_all_the_same(folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "forgetful.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ended = subprocess.run(
        [sys.executable, str(script), str(folder)], env=environment, capture_output=True, text=True, timeout=200
    )
    assert ended.returncode == 7, ended.stderr
    assert not Path(f"/proc/{int(ended.stdout)}").exists()
