"""Rounds of our engine, and of a baseline in turn with it: on a machine whose speed varies only neighbours compare."""

import contextlib
from collections.abc import Callable
from typing import Literal

from mmserve.bench.driver import measure_engine
from mmserve.bench.report import Report, compare, make_report, median_round
from mmserve.bench.transformers_baseline import TransformersBaseline
from mmserve.bench.workloads import Workload
from mmserve.config import EngineConfig


def run_throughput(
    config: EngineConfig,
    workload: Workload,
    *,
    rounds: int = 1,
    baseline: Literal["transformers"] | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """The report of the median round, or with a baseline the comparison of both (see `compare`)."""
    model = config.names[0]
    ours: list[Report] = []
    theirs: list[Report] = []
    with contextlib.ExitStack() as stack:
        other: TransformersBaseline | None = None
        if baseline is not None:
            on_progress(f"Loading {model} in {baseline}")
            other = stack.enter_context(TransformersBaseline(config))
        for number in range(1, rounds + 1):
            on_progress(f"{workload.name}, round {number} of {rounds}: mmserve")
            measured = measure_engine(config, workload, excluded_pids=() if other is None else (other.pid,))
            ours.append(make_report(measured, workload=workload.name, model=model))
            if other is not None:
                on_progress(f"{workload.name}, round {number} of {rounds}: {baseline}")
                theirs.append(make_report(other.measure(workload), workload=workload.name, model=model))
    return median_round(ours) if baseline is None else compare(ours, theirs, name=baseline)
