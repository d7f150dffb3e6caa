"""Plain structs that cross the boundary between front end and engine, by queue or by pipe."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from mmserve.errors import ErrorCode, MMServeError
from mmserve.request import FinishReason, ImageSpan, SamplingParams, TokenLogprob


@dataclass(frozen=True)
class EngineRequest:
    """One sequence to generate (`params.n` was already fanned out by the client).

    Only requests of the same `cache_salt` share blocks of the prefix cache.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int = 0
    images: tuple[ImageSpan, ...] = ()
    arrival_time: float = 0.0
    cache_salt: bytes = b""


@dataclass(frozen=True)
class AbortRequest:
    request_id: str


@dataclass(frozen=True)
class Shutdown:
    """Stop after the current step; what is in flight ends as aborted."""


@dataclass(frozen=True)
class Ping:
    """Answered by a `Pong` of the same number once all that was sent before it has taken effect."""

    number: int


ToEngine = EngineRequest | AbortRequest | Ping | Shutdown


@dataclass(frozen=True)
class RequestFailure:
    """Why one request was refused or lost."""

    code: ErrorCode
    message: str
    param: str | None = None


def as_failure(error: MMServeError) -> RequestFailure:
    return RequestFailure(error.code, error.message, error.param)


# A tuple, since there is one for every token of every sequence: making a frozen dataclass takes twice as long.
class TokenOutput(NamedTuple):
    """What a step added to one sequence. The last one carries `finish_reason`; `queue_seconds` comes with the first."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    queue_seconds: float = 0.0
    failure: RequestFailure | None = None
    encoder_seconds: float = 0.0


class EngineStats(NamedTuple):
    """Gauges and running totals since start, as the metrics of the same names."""

    num_requests_running: int = 0
    num_requests_waiting: int = 0
    kv_cache_usage_ratio: float = 0.0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    encoder_cache_queries: int = 0
    encoder_cache_hits: int = 0
    num_encoder_runs: int = 0
    num_encoder_tokens: int = 0
    encoder_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class StepOutput:
    outputs: tuple[TokenOutput, ...]
    stats: EngineStats

    def __reduce__(self) -> tuple[Callable[..., "StepOutput"], tuple[Any, ...]]:
        """Pickled as columns, of which most are one value: for 256 outputs a third of the bytes of one object each."""
        columns = tuple(map(_without_repetition, zip(*self.outputs, strict=True)))
        return _step_of_columns, (len(self.outputs), columns, tuple(self.stats))


def _without_repetition(column: tuple[Any, ...]) -> tuple[Any, ...]:
    return column[:1] if column.count(column[0]) == len(column) else column


def _step_of_columns(num_outputs: int, columns: tuple[tuple[Any, ...], ...], stats: tuple[Any, ...]) -> StepOutput:
    whole = (column * num_outputs if len(column) == 1 else column for column in columns)
    return StepOutput(tuple(map(TokenOutput._make, zip(*whole, strict=True))), EngineStats._make(stats))


@dataclass(frozen=True)
class EngineReady:
    """Loaded and warmed up."""

    max_model_len: int
    num_blocks: int
    device: str
    dtype: str


@dataclass(frozen=True)
class EngineFailed:
    """The engine cannot start or has died; `message` says why."""

    code: ErrorCode
    message: str


@dataclass(frozen=True)
class Pong:
    number: int


@dataclass(frozen=True)
class LogLine:
    """What the engine's process has to say in the log, for the front end to write: `level` is a number of logging."""

    level: int
    logger: str
    message: str


FromEngine = StepOutput | EngineReady | EngineFailed | Pong | LogLine
