"""Runs a workload on our own engine: all requests offered at once, greedy, no end of sequence, ids in and ids out."""

import asyncio
import time
from collections.abc import Collection
from typing import NamedTuple

import torch

from mmserve.bench.memory import MemoryWatcher
from mmserve.bench.report import Measurement, RequestRecord
from mmserve.bench.workloads import Prompt, Workload, text_prompts
from mmserve.config import EngineConfig
from mmserve.engine.client import EngineClient
from mmserve.errors import EngineError
from mmserve.request import SamplingParams


def warm_up_prompt(length: int) -> Prompt:
    """Begins with no token of a workload's prompts, so that it cannot warm the prefix cache for them."""
    return text_prompts(1, length, seed=99)[0]


WARM_UP_PROMPT = warm_up_prompt(32)


class Round(NamedTuple):
    """`first` is what the engine was asked before everything else; `records` are in the order of the prompts."""

    first: RequestRecord
    records: list[RequestRecord]


def measure_engine(config: EngineConfig, workload: Workload, *, excluded_pids: Collection[int] = ()) -> Measurement:
    """Start a fresh engine (so that no prefix is cached), warm it up, and measure one round.

    `excluded_pids` are processes whose memory is not ours. Raises what `EngineClient` raises.
    """
    with MemoryWatcher(excluded_pids) as memory:
        started = time.perf_counter()
        client = EngineClient.start(config)
        try:
            client.wait_until_ready()
            start_seconds = time.perf_counter() - started
            info = client.engine_info
            assert info is not None
            first, records = asyncio.run(run_workload(client, workload))
        finally:
            client.close()
    return Measurement(
        records=records,
        peak_memory_bytes=memory.peak_bytes,
        device=info.device,
        dtype=info.dtype,
        threads=config.num_threads or torch.get_num_threads(),
        start_seconds=start_seconds,
        model=client.model_config,
        first=first if workload.width == 1 else None,
    )


async def run_workload(client: EngineClient, workload: Workload) -> Round:
    """Where requests come one at a time the first of all is as long as they are, to be compared with them."""
    prompt = warm_up_prompt(len(workload.prompts[0])) if workload.width == 1 else WARM_UP_PROMPT
    first = await _run_request(client, prompt, 4)
    if workload.warm_prefix:
        await _run_request(client, workload.warm_prefix, 1)
    free_places = asyncio.Semaphore(workload.width)

    async def run_in_turn(prompt: Prompt) -> RequestRecord:
        async with free_places:
            return await _run_request(client, prompt, workload.max_tokens)

    return Round(first, await asyncio.gather(*(run_in_turn(prompt) for prompt in workload.prompts)))


async def _run_request(client: EngineClient, prompt: Prompt, max_tokens: int) -> RequestRecord:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    token_times: list[float] = []
    offered = time.perf_counter()
    async for delta in client.generate(list(prompt), params):
        token_times += [time.perf_counter()] * len(delta.token_ids)
    if len(token_times) != max_tokens:
        message = f"a request ended after {len(token_times)} of {max_tokens} tokens: its figures would mean nothing"
        raise EngineError("internal_error", message)
    return RequestRecord(offered, token_times[0], token_times[-1], len(prompt), max_tokens)
