"""Rounds of our engine, and of a baseline in turn with it: on a machine whose speed varies only neighbours compare."""

import contextlib
from collections.abc import Callable
from typing import Literal

from mmserve.bench.ceilings import measure_ceilings
from mmserve.bench.driver import measure_engine
from mmserve.bench.limits import Ceilings, bytes_of, text_limit
from mmserve.bench.report import Measurement, Report, compare, make_report, median_round
from mmserve.bench.transformers_baseline import TransformersBaseline
from mmserve.bench.workloads import Workload
from mmserve.config import EngineConfig


def run_throughput(
    config: EngineConfig,
    workload: Workload,
    *,
    rounds: int = 1,
    baseline: Literal["transformers"] | None = None,
    ceilings: Ceilings | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """The report of the median round, or with a baseline the comparison of both (see `compare`).

    With the share of the device's limit (see `limits`) where its `ceilings` are given, or can be measured on a GPU.
    """
    model = config.names[0]
    ours: list[Measurement] = []
    theirs: list[Report] = []
    with contextlib.ExitStack() as stack:
        other: TransformersBaseline | None = None
        if baseline is not None:
            on_progress(f"Loading {model} in {baseline}")
            other = stack.enter_context(TransformersBaseline(config))
        for number in range(1, rounds + 1):
            on_progress(f"{workload.name}, round {number} of {rounds}: mmserve")
            ours.append(measure_engine(config, workload, excluded_pids=() if other is None else (other.pid,)))
            if other is not None:
                on_progress(f"{workload.name}, round {number} of {rounds}: {baseline}")
                theirs.append(make_report(other.measure(workload), workload=workload.name, model=model))
    if ceilings is None and ours[0].device.startswith("cuda"):
        on_progress("Measuring what the device allows")
        ceilings = measure_ceilings(ours[0].device)
    reports = [
        {**make_report(measured, workload=workload.name, model=model), **_limit_report(measured, workload, ceilings)}
        for measured in ours
    ]
    return median_round(reports) if baseline is None else compare(reports, theirs, name=baseline)


def _limit_report(measured: Measurement, workload: Workload, ceilings: Ceilings | None) -> Report:
    if ceilings is None or measured.model is None:
        return {}
    limit = text_limit(measured.model, workload, ceilings, num_bytes=bytes_of(measured.dtype))
    return limit.report(measured.seconds)
