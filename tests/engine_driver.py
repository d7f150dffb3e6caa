"""Drives an `Engine` without a client: requests in, tokens out, invariants checked after every step."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from mmserve.cache.kv_cache import KVCache
from mmserve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from mmserve.engine.engine import Engine
from mmserve.engine.messages import EngineRequest
from mmserve.engine.scheduler import Scheduler, advance
from mmserve.request import SamplingParams, SequenceStatus
from mmserve.request import Sequence as EngineSequence
from mmserve.weights.checkpoint import open_checkpoint

MAX_STEPS = 20_000


def engine_config(
    folder: Path, *, num_blocks: int = 256, block_size: int = 16, prefix_caching: bool = True, **scheduler: Any
) -> EngineConfig:
    """float32 on the CPU, with exactly `num_blocks` blocks; `scheduler` are fields of `SchedulerConfig`."""
    model = ModelConfig.from_hf(open_checkpoint(str(folder)).config)
    memory_bytes = num_blocks * KVCache.bytes_per_block(model, block_size, torch.float32)
    cache = CacheConfig(block_size=block_size, memory_bytes=memory_bytes, enable_prefix_caching=prefix_caching)
    return EngineConfig(
        model=str(folder),
        dtype="float32",
        device="cpu",
        num_threads=1,
        cache=cache,
        scheduler=SchedulerConfig(**scheduler),
    )


def greedy(max_tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **fields)


def run_to_end(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    after_step: Callable[[Engine], None] | None = None,
) -> list[list[int]]:
    """The tokens of every prompt; all are offered at once."""
    requests = [EngineRequest(str(i), list(prompt), params) for i, prompt in enumerate(prompts)]
    return run_requests(engine, requests, after_step=after_step)


def run_requests(
    engine: Engine, requests: Sequence[EngineRequest], *, after_step: Callable[[Engine], None] | None = None
) -> list[list[int]]:
    """The tokens of every request, in order; all are offered at once."""
    answers: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        refusal = engine.add_request(request)
        assert refusal is None, refusal
    num_steps = 0
    while engine.has_work:
        num_steps += 1
        assert num_steps <= MAX_STEPS, "the engine has work and gets nowhere"
        for output in engine.step().outputs:
            answers[output.request_id] += output.token_ids
        check_invariants(engine.scheduler)
        if after_step is not None:
            after_step(engine)
    return list(answers.values())


@torch.inference_mode()
def prompt_logits(engine: Engine, prompt: Sequence[int], num_per_step: int = 16) -> torch.Tensor:
    """Of every position, computed some tokens a step through the paged cache."""
    runner, rows = engine._runner, []
    blocks = list(range(-(-len(prompt) // runner.block_size)))
    sequence = EngineSequence("logits", list(prompt), SamplingParams(), block_ids=blocks)
    while sequence.num_computed_tokens < len(prompt):
        count = min(num_per_step, len(prompt) - sequence.num_computed_tokens)
        rows.append(runner._model.logits(runner._forward(runner._inputs.build([advance(sequence, count)], {}))))
    return torch.cat(rows)


def check_invariants(scheduler: Scheduler) -> None:
    """Blocks partition the pool, references add up, and only running sequences own anything."""
    pool = scheduler.pool
    pool.check_invariants()
    owners: dict[int, int] = {}
    for sequence in scheduler.running:
        assert sequence.status is SequenceStatus.RUNNING
        assert len(sequence.block_ids) * scheduler.block_size >= sequence.num_computed_tokens
        for block_id in sequence.block_ids:
            owners[block_id] = owners.get(block_id, 0) + 1
    for sequence in scheduler.waiting:
        assert not sequence.block_ids
        assert sequence.num_computed_tokens == 0
    assert all(pool.num_references(block_id) == count for block_id, count in owners.items())
    assert pool.num_referenced == len(owners)
    assert len(scheduler.running) <= scheduler.config.max_num_seqs
    scheduler.images.check_invariants(scheduler.running)
    running, waiting = ([sequence.request_id for sequence in each] for each in (scheduler.running, scheduler.waiting))
    scheduler.in_progress.check_invariants(running, waiting)
