"""Times of requests -> the figures of a run, and the comparison of two engines round by round."""

import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np

from mmserve import __version__
from mmserve.config import ModelConfig

Report = dict[str, Any]


@dataclass(frozen=True)
class RequestRecord:
    """One request. Times are in seconds on one clock; `offered` is when it was handed to the engine."""

    offered: float
    first_token: float
    last_token: float
    num_prompt_tokens: int
    num_output_tokens: int

    @property
    def time_to_first_token(self) -> float:
        return self.first_token - self.offered

    @property
    def time_per_output_token(self) -> float:
        """Mean gap between its tokens after the first."""
        return (self.last_token - self.first_token) / max(self.num_output_tokens - 1, 1)

    @property
    def end_to_end(self) -> float:
        return self.last_token - self.offered


@dataclass(frozen=True)
class Measurement:
    """One round of one engine. `seconds` go from the first request offered to the last token.

    `start_seconds` go from the engine's start until it was ready; None where that was not measured. `first` is the
    request that came before all `records`, if it can be compared with them.
    """

    records: Sequence[RequestRecord]
    peak_memory_bytes: int
    device: str
    dtype: str
    threads: int
    start_seconds: float | None = None
    model: ModelConfig | None = None
    first: RequestRecord | None = None

    @property
    def seconds(self) -> float:
        return _total_seconds(self.records)


def _total_seconds(records: Sequence[RequestRecord]) -> float:
    """From the first request offered to the last token."""
    return max(record.last_token for record in records) - min(record.offered for record in records)


def speed_report(records: Sequence[RequestRecord]) -> Report:
    """Rates and latencies of one round, ready for JSON."""
    seconds = _total_seconds(records)
    num_output_tokens = sum(record.num_output_tokens for record in records)
    num_tokens = num_output_tokens + sum(record.num_prompt_tokens for record in records)
    return {
        "requests_per_second": round(len(records) / seconds, 4),
        "output_tokens_per_second": round(num_output_tokens / seconds, 2),
        "total_tokens_per_second": round(num_tokens / seconds, 2),
        "ttft_ms": percentiles_ms([record.time_to_first_token for record in records]),
        "tpot_ms": percentiles_ms([record.time_per_output_token for record in records]),
    }


def make_report(measurement: Measurement, *, workload: str, model: str) -> Report:
    """The figures of one round, ready for JSON."""
    start: Report = {}
    if measurement.first is not None:
        start["first_request_ttft_ms"] = round(measurement.first.time_to_first_token * 1000, 3)
    if measurement.start_seconds is not None:
        start["start_seconds"] = round(measurement.start_seconds, 3)
    return {
        **speed_report(measurement.records),
        "peak_memory_bytes": measurement.peak_memory_bytes,
        **start,
        "workload": workload,
        "model": model,
        "device": measurement.device,
        "dtype": measurement.dtype,
        "threads": measurement.threads,
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    packages = {name: version(name) for name in ("torch", "transformers", "tokenizers")}
    return {"mmserve": __version__, "python": platform.python_version(), **packages}


def median_round(reports: Sequence[Report]) -> Report:
    """The round in the middle by output tokens per second; of an even number, the slower of the two."""
    return sorted(reports, key=_speed)[(len(reports) - 1) // 2]


def compare(ours: Sequence[Report], theirs: Sequence[Report], *, name: str) -> Report:
    """Both median rounds, and by how much ours is faster: the median of the ratios of neighbouring rounds."""
    ratios = [_speed(our) / _speed(their) for our, their in zip(ours, theirs, strict=True)]
    speeds = zip(ours, theirs, ratios, strict=True)
    return {
        "mmserve": median_round(ours),
        name: median_round(theirs),
        "ratio": round(statistics.median(ratios), 3),
        "rounds": [{"mmserve": _speed(our), name: _speed(their), "ratio": round(r, 3)} for our, their, r in speeds],
    }


def _speed(report: Report) -> float:
    return float(report["output_tokens_per_second"])


def percentiles_ms(seconds: list[float]) -> dict[str, float]:
    p50, p99 = np.percentile(seconds, [50, 99]) * 1000
    return {"p50": round(float(p50), 3), "p99": round(float(p99), 3)}
