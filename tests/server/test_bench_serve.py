"""`bench serve` against a live server with a scripted engine, and against answers that only other servers give."""

import asyncio
import itertools
import json
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import serving
from scripted_engine import ScriptedEngine
from typer.testing import CliRunner

from mmserve.bench.driver import WARM_UP_PROMPT
from mmserve.bench.serve import CompletionsApi, Pace, RequestFailed, run_serve
from mmserve.bench.workloads import Workload
from mmserve.cli import app
from mmserve.config import EngineConfig, SchedulerConfig
from mmserve.engine.client import CompletionDelta
from mmserve.errors import EngineError, RequestError, SetupError
from mmserve.request import ImageSpan, SamplingParams

WORKLOAD = Workload("W", tuple((1000 + number, 66, 67) for number in range(6)), max_tokens=5)
SEATS = EngineConfig(served_model_name=("scripted",), scheduler=SchedulerConfig(max_num_seqs=64))


class CountingEngine(ScriptedEngine):
    """Takes any ids, keeps them, and counts how many requests there are at once."""

    def __init__(self, **script: Any) -> None:
        super().__init__(**{"config": SEATS, "seconds_per_token": 0.002, **script})
        self.prompt_ids: list[tuple[int, ...]] = []
        self.num_running = self.most_running = 0

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        images: Sequence[ImageSpan] = (),
        cache_salt: bytes = b"",
    ) -> AsyncGenerator[CompletionDelta, None]:
        self.prompt_ids.append(tuple(prompt_token_ids))
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            async for delta in super().generate([65] * len(prompt_token_ids), params, request_id=request_id):
                yield delta
        finally:
            self.num_running -= 1


def test_the_figures_of_a_workload() -> None:
    engine = CountingEngine()
    with serving(engine) as server:
        report = run_serve(server.url, WORKLOAD, Pace())
    assert engine.prompt_ids[0] == WARM_UP_PROMPT
    assert set(engine.prompt_ids[1:]) == set(WORKLOAD.prompts)
    assert {(params.temperature, params.max_tokens, params.ignore_eos) for params in engine.params[1:]} == {
        (0.0, 5, True)
    }
    assert (report["num_requests"], report["failures"], report["prompts"]) == (6, {}, "token ids")
    assert (report["workload"], report["model"], report["url"]) == ("W", "scripted", server.url)
    # Five characters, two milliseconds before each.
    assert report["e2e_ms"]["p50"] >= 5 * 1.9
    assert 1.9 <= report["ttft_ms"]["p50"] <= report["e2e_ms"]["p50"]
    assert report["tpot_ms"]["p99"] <= report["e2e_ms"]["p99"] / 4
    assert report["total_tokens_per_second"] == pytest.approx(report["output_tokens_per_second"] * 8 / 5, rel=1e-3)
    assert set(report["e2e_ms"]) == {"p50", "p99"}


@pytest.mark.parametrize(("pace", "most"), [(Pace(), 6), (Pace(concurrency=2), 2), (Pace(request_rate=1e6), 6)])
def test_the_pace_bounds_what_runs_at_once(pace: Pace, most: int) -> None:
    engine = CountingEngine(seconds_per_token=0.05)
    with serving(engine) as server:
        run_serve(server.url, WORKLOAD, pace)
    assert engine.most_running == most


def test_a_workload_may_be_one_stream_and_warm_a_prefix() -> None:
    engine = CountingEngine()
    with serving(engine) as server:
        stream = Workload("S", WORKLOAD.prompts[:3], max_tokens=2, concurrency=1, warm_prefix=(7, 8))
        report = run_serve(server.url, stream, Pace())
    assert engine.prompt_ids == [WARM_UP_PROMPT, (7, 8), *stream.prompts]
    assert (engine.most_running, report["concurrency"]) == (1, 1)


def test_arrivals_are_a_poisson_process_from_a_fixed_seed() -> None:
    arrivals = list(itertools.islice(Pace(request_rate=50.0).arrivals(), 4001))
    assert arrivals == list(itertools.islice(Pace(request_rate=50.0).arrivals(), 4001))
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.05)
    # Of an exponential distribution the deviation is the mean.
    assert math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) == pytest.approx(mean, rel=0.1)
    assert list(itertools.islice(Pace().arrivals(), 3)) == [0.0, 0.0, 0.0]


def test_requests_come_at_their_rate() -> None:
    with serving(CountingEngine(seconds_per_token=0.0)) as server:
        report = run_serve(server.url, WORKLOAD, Pace(request_rate=40.0))
    last = list(itertools.islice(Pace(request_rate=40.0).arrivals(), 6))[-1]
    assert report["requests_per_second"] <= 6 / last


def test_failures_are_counted_by_code_and_the_rest_is_measured() -> None:
    seats = EngineConfig(scheduler=SchedulerConfig(max_num_seqs=1, max_num_waiting=1))
    with serving(CountingEngine(config=seats, seconds_per_token=0.1)) as server:
        report = run_serve(server.url, WORKLOAD, Pace())
    assert report["failures"] == {"queue_full": 4}
    assert report["num_requests"] == 6
    assert report["output_tokens_per_second"] > 0


def test_answers_that_end_too_soon_count_as_failures() -> None:
    with serving(CountingEngine(answer="four")) as server, pytest.raises(EngineError, match="cut_short: 4 of 5"):
        run_serve(server.url, WORKLOAD, Pace())


def test_a_server_that_refuses_everything_is_an_error() -> None:
    with serving(CountingEngine()) as server, pytest.raises(EngineError, match="model_not_found"):
        run_serve(server.url, WORKLOAD, Pace(), model="other")


def test_no_server_at_all() -> None:
    with pytest.raises(SetupError, match="mmserve serve"):
        run_serve("http://127.0.0.1:1", WORKLOAD, Pace())
    with pytest.raises(RequestError, match="--url"):
        run_serve("http://x:port", WORKLOAD, Pace())


@pytest.mark.parametrize("fields", [{"request_rate": 1.0, "concurrency": 1}, {"request_rate": 0.0}, {"concurrency": 0}])
def test_a_pace_that_makes_no_sense(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        Pace(**fields)


# Other servers


def prepared(handler: Callable[[httpx.Request], httpx.Response]) -> CompletionsApi:
    return asyncio.run(_prepared(handler))


async def _prepared(handler: Callable[[httpx.Request], httpx.Response]) -> CompletionsApi:
    async with httpx.AsyncClient(base_url="http://x", transport=httpx.MockTransport(handler)) as http:
        api = CompletionsApi(http, "m")
        await api.prepare()
        await api.complete((1, 2), 4)
        return api


def stream_of(*chunks: dict[str, Any]) -> httpx.Response:
    return httpx.Response(200, text="".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n")


WHOLE = (
    {"choices": [{"text": "a"}]},
    {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4}},
)


def test_a_server_that_takes_no_ids_gets_as_many_words() -> None:
    prompts: list[Any] = []

    def handler(request: httpx.Request) -> httpx.Response:
        prompts.append(json.loads(request.content)["prompt"])
        if not isinstance(prompts[-1], str):
            return httpx.Response(422, json={"detail": "prompt: a string"})
        return stream_of(*WHOLE)

    assert prepared(handler).sends_text
    assert len(prompts[-1].split()) == 2
    assert prompts[-1].replace(" ", "").isalpha()


@pytest.mark.parametrize(
    ("response", "code"),
    [
        (httpx.Response(503, text="busy"), "503"),
        (httpx.Response(429, json={"error": {"message": "later", "code": "queue_full"}}), "queue_full"),
        (httpx.Response(400, json={"error": {"message": "no such field", "code": None}}), "400"),
        (stream_of(WHOLE[0], {"error": {"message": "it died", "code": "engine_dead"}}), "engine_dead"),
        (stream_of(WHOLE[0]), "cut_short"),
    ],
    ids=["status alone", "code", "no code", "in the stream", "no usage"],
)
def test_each_failure_has_a_code(response: httpx.Response, code: str) -> None:
    def handler(_: httpx.Request) -> httpx.Response:
        return httpx.Response(response.status_code, content=response.content)

    with pytest.raises(EngineError, match=f"answer: {code}:"):
        prepared(handler)


@pytest.mark.parametrize(
    ("error", "code"), [(httpx.ReadTimeout("slow"), "timeout"), (httpx.ReadError("gone"), "connection_failed")]
)
def test_what_goes_wrong_on_the_way(error: Exception, code: str) -> None:
    def handler(_: httpx.Request) -> httpx.Response:
        raise error

    async def complete() -> None:
        async with httpx.AsyncClient(base_url="http://x", transport=httpx.MockTransport(handler)) as http:
            await CompletionsApi(http, "m").complete((1,), 1)

    with pytest.raises(RequestFailed) as caught:
        asyncio.run(complete())
    assert caught.value.code == code


# The command


def test_the_command_prints_one_json_object_and_writes_it(tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    with serving(CountingEngine(answer="x" * 100, seconds_per_token=0.0)) as server:
        options = ["--url", server.url, "--workload", "C1", "--num-prompts", "2", "--concurrency", "1"]
        result = CliRunner().invoke(app, ["bench", "serve", *options, "--output", str(output)])
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(output.read_text()) == json.loads(result.stdout)
    assert json.loads(result.stdout)["num_requests"] == 2


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--request-rate", "0"], 2),
        (["--request-rate", "3", "--concurrency", "2"], 2),
        (["--workload", "C9"], 2),
        (["--output", "/no/such/folder/x.json"], 2),
        (["--url", "http://127.0.0.1:1"], 3),
    ],
    ids=str,
)
def test_the_command_says_what_is_wrong(arguments: list[str], code: int) -> None:
    result = CliRunner().invoke(app, ["bench", "serve", *arguments])
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr
