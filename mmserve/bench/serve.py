"""Drives a running server over HTTP: requests at a rate or so many at once, streamed, greedy, of a fixed length.

The server may be any with OpenAI's `/v1/completions` that takes `ignore_eos`. Prompts go as token ids, or, where the
server refuses those, as text of as many words.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from mmserve.bench.driver import WARM_UP_PROMPT
from mmserve.bench.report import Report, RequestRecord, percentiles_ms, speed_report, versions
from mmserve.bench.workloads import Prompt, Workload
from mmserve.errors import EngineError, RequestError, SetupError

_ARRIVAL_SEED = 0
_WARM_UP_TOKENS = 4
# What servers say to a prompt in a form that they do not know.
_REFUSED_FORM = (400, 422)


class RequestFailed(Exception):
    """One request got no whole answer. `code` is the server's, or says what went wrong on the way."""

    def __init__(self, code: str, message: str, status: int | None = None) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.status = status


@dataclass(frozen=True)
class Pace:
    """When requests are sent: at random moments, `request_rate` a second, or `concurrency` at a time, or all at once.

    Raises `RequestError` (`invalid_request`) if both are given, or one is not positive.
    """

    request_rate: float | None = None
    concurrency: int | None = None

    def __post_init__(self) -> None:
        if self.request_rate is not None and self.concurrency is not None:
            raise RequestError("invalid_request", "give --request-rate or --concurrency, not both")
        if self.request_rate is not None and not 0 < self.request_rate < float("inf"):
            raise RequestError("invalid_request", "--request-rate must be positive", param="request_rate")
        if self.concurrency is not None and self.concurrency < 1:
            raise RequestError("invalid_request", "--concurrency must be at least 1", param="concurrency")

    def arrivals(self) -> Iterator[float]:
        """Seconds from the start at which requests are sent: a Poisson process, the same in every run."""
        rng, moment = random.Random(_ARRIVAL_SEED), 0.0
        while True:
            yield moment
            moment += rng.expovariate(self.request_rate) if self.request_rate else 0.0


class CompletionsApi:
    """The one endpoint that is used."""

    def __init__(self, http: httpx.AsyncClient, model: str | None = None) -> None:
        """`model` is asked of the server if it is not given."""
        self._http = http
        self.model = model
        self.sends_text = False

    async def prepare(self) -> None:
        """Find the model, and the form of prompts that is taken. Raises `SetupError`, `EngineError`."""
        if self.model is None:
            self.model = await self._first_model()
        try:
            await self.complete(WARM_UP_PROMPT, _WARM_UP_TOKENS)
        except RequestFailed as error:
            if error.status not in _REFUSED_FORM:
                raise _refused(error) from None
            self.sends_text = True
            try:
                await self.complete(WARM_UP_PROMPT, _WARM_UP_TOKENS)
            except RequestFailed:
                # What was wrong was not the form.
                raise _refused(error) from None

    async def complete(self, prompt: Prompt, max_tokens: int) -> RequestRecord:
        """Raises `RequestFailed`, also for an answer that is cut short."""
        body = {
            "model": self.model,
            "prompt": _as_text(prompt) if self.sends_text else list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        offered = time.perf_counter()
        token_times: list[float] = []
        usage: dict[str, Any] = {}
        async for chunk in self._chunks(body):
            usage = chunk.get("usage") or usage
            if chunk.get("choices"):
                token_times.append(time.perf_counter())
        if usage.get("completion_tokens") != max_tokens or not token_times:
            raise RequestFailed("cut_short", f"{usage.get('completion_tokens')} of {max_tokens} tokens came")
        return RequestRecord(offered, token_times[0], token_times[-1], usage["prompt_tokens"], max_tokens)

    async def _first_model(self) -> str:
        try:
            answer = await self._http.get("/v1/models")
            answer.raise_for_status()
            return str(answer.json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, LookupError) as error:
            url = self._http.base_url
            raise SetupError(
                "model_unavailable", f"no model is served at {url} ({type(error).__name__}): start `mmserve serve`"
            ) from None

    async def _chunks(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        try:
            async with self._http.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    raise _failure(await response.aread(), response.status_code)
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        yield _checked(json.loads(line.removeprefix("data: ")))
        except httpx.TimeoutException:
            raise RequestFailed("timeout", "the server did not answer in time") from None
        except httpx.HTTPError as error:
            raise RequestFailed("connection_failed", str(error) or type(error).__name__) from None


def run_serve(
    url: str,
    workload: Workload,
    pace: Pace,
    *,
    model: str | None = None,
    timeout: float = 600.0,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Rates and latencies of the answers that were whole, and how many failed, by code.

    Times are those of chunks with text, as this side sees them. Raises `SetupError` if no server answers, `EngineError`
    if it refuses the first request or every one.
    """
    return asyncio.run(_run(url, workload, pace, model, timeout, on_progress))


async def _run(
    url: str,
    workload: Workload,
    pace: Pace,
    model: str | None,
    timeout: float,
    on_progress: Callable[[str], None],
) -> Report:
    async with _open(url, timeout) as http:
        api = CompletionsApi(http, model)
        on_progress("Warming up")
        await api.prepare()
        on_progress(f"{workload.name}: {len(workload.prompts)} requests")
        records, failures = await drive(api, workload, pace)
    return {
        **speed_report(records),
        "e2e_ms": percentiles_ms([record.end_to_end for record in records]),
        "num_requests": len(workload.prompts),
        "failures": dict(sorted(failures.items())),
        "workload": workload.name,
        "model": api.model,
        "url": url,
        "request_rate": pace.request_rate,
        "concurrency": pace.concurrency or workload.concurrency,
        "prompts": "text" if api.sends_text else "token ids",
        "versions": versions(),
    }


def _open(url: str, timeout: float) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    try:
        return httpx.AsyncClient(base_url=url, timeout=timeout, limits=limits, trust_env=False)
    except httpx.InvalidURL as error:
        raise RequestError("invalid_request", f"--url {url!r} is no address: {error}", param="url") from None


async def drive(api: CompletionsApi, workload: Workload, pace: Pace) -> tuple[list[RequestRecord], Counter[str]]:
    """The records of whole answers, in the order of the prompts, and the failures by code."""
    if workload.warm_prefix:
        await _complete_or_refuse(api, workload.warm_prefix)
    width = len(workload.prompts) if pace.request_rate else pace.concurrency or workload.width
    free_places = asyncio.Semaphore(width)
    started = time.perf_counter()

    async def send(prompt: Prompt, arrival: float) -> RequestRecord:
        await asyncio.sleep(started + arrival - time.perf_counter())
        async with free_places:
            return await api.complete(prompt, workload.max_tokens)

    tasks = [send(prompt, arrival) for prompt, arrival in zip(workload.prompts, pace.arrivals(), strict=False)]
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    records = [outcome for outcome in outcomes if isinstance(outcome, RequestRecord)]
    failures = [outcome for outcome in outcomes if isinstance(outcome, RequestFailed)]
    unexpected = [outcome for outcome in outcomes if not isinstance(outcome, RequestRecord | RequestFailed)]
    if unexpected:
        raise unexpected[0]
    if not records:
        raise _refused(failures[0])
    return records, Counter(failure.code for failure in failures)


async def _complete_or_refuse(api: CompletionsApi, prompt: Prompt) -> None:
    try:
        await api.complete(prompt, 1)
    except RequestFailed as error:
        raise _refused(error) from None


def _checked(chunk: dict[str, Any]) -> dict[str, Any]:
    if chunk.get("error"):
        raise RequestFailed(str(chunk["error"].get("code")), str(chunk["error"].get("message")))
    return chunk


def _failure(body: bytes, status: int) -> RequestFailed:
    try:
        error = json.loads(body)["error"]
        return RequestFailed(str(error.get("code") or status), str(error.get("message")), status)
    except (ValueError, LookupError, TypeError, AttributeError):
        return RequestFailed(str(status), f"the server answered with status {status}", status)


def _refused(error: RequestFailed) -> EngineError:
    return EngineError("internal_error", f"the server gave no whole answer: {error}")


def _as_text(prompt: Prompt) -> str:
    """A word of letters for each id."""
    return " ".join(f"{token_id:x}".translate(_LETTERS) for token_id in prompt)


_LETTERS = str.maketrans("0123456789abcdef", "abcdefghijklmnop")
