"""An answer as its reader sees it: text deltas built from the engine's token outputs, and how long they took."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

from mmserve.engine.detokenizer import Detokenizer
from mmserve.engine.messages import RequestFailure, TokenOutput
from mmserve.errors import HTTP_STATUS, EngineError, MMServeError, RequestError, SetupError
from mmserve.request import FinishReason, SamplingParams, TokenLogprob
from mmserve.weights.tokenizer import Tokenizer


# Not frozen, since there is one for every token: making a frozen one takes five times as long.
@dataclass(slots=True)
class CompletionDelta:
    """What is new of answer `index`. The last one carries `finish_reason`, and the stop string or token id if any."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    num_prompt_tokens: int
    num_cached_tokens: int


class Completion(CompletionDelta):
    """A whole answer: all its deltas as one."""

    __slots__ = ()


@dataclass(frozen=True)
class RequestTimings:
    """Seconds, as seen by the front end, of one finished, failed or abandoned answer. `started` is `time.monotonic`'s.

    `encoder_seconds` are of the steps that encoded its pictures, other requests' in the same steps included.
    """

    queue_seconds: float
    time_to_first_token: float | None
    inter_token_latencies: tuple[float, ...]
    e2e_seconds: float
    num_prompt_tokens: int
    num_output_tokens: int
    finish_reason: FinishReason
    encoder_seconds: float = 0.0
    started: float = 0.0


class AnswerBuilder:
    """Turns the outputs of one sequence into deltas."""

    def __init__(self, index: int, num_prompt_tokens: int, params: SamplingParams, tokenizer: Tokenizer) -> None:
        self._index = index
        self._num_prompt_tokens = num_prompt_tokens
        self._params = params
        self._detokenizer = Detokenizer(tokenizer, params) if params.detokenize else None
        self._started = time.monotonic()
        self._token_times: list[float] = []
        self._queue_seconds = 0.0
        self._encoder_seconds = 0.0
        self._num_cached_tokens = 0
        self._finish_reason: FinishReason | None = None
        self._ended: float | None = None

    def push(self, output: TokenOutput) -> CompletionDelta:
        """The delta of one output. Raises what the engine says against the request."""
        if output.failure is not None:
            raise _as_request_exception(output.failure)
        if output.token_ids:
            self._queue_seconds, self._encoder_seconds = output.queue_seconds, output.encoder_seconds
            self._num_cached_tokens = output.num_cached_tokens
            self._token_times += [time.monotonic()] * len(output.token_ids)
        text = "" if self._detokenizer is None else self._detokenizer.push(self._visible_ids(output))
        finish_reason, stop_reason = self._end(output)
        if finish_reason is not None:
            text += "" if self._detokenizer is None else self._detokenizer.finish()
            self._finish(finish_reason)
        # By position, in the order of the fields: there is one for every token.
        return CompletionDelta(
            self._index,
            text,
            output.token_ids,
            output.logprobs,
            finish_reason,
            stop_reason,
            self._num_prompt_tokens,
            self._num_cached_tokens,
        )

    def fail(self) -> None:
        """The rest will not come: unless it was whole already, the answer counts as an error."""
        if self._finish_reason is None:
            self._finish("error")

    def timings(self) -> RequestTimings:
        times = self._token_times
        return RequestTimings(
            queue_seconds=self._queue_seconds,
            time_to_first_token=times[0] - self._started if times else None,
            inter_token_latencies=tuple(later - earlier for earlier, later in itertools.pairwise(times)),
            e2e_seconds=(self._ended or time.monotonic()) - self._started,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=len(times),
            finish_reason=self._finish_reason or "abort",
            encoder_seconds=self._encoder_seconds,
            started=self._started,
        )

    def _visible_ids(self, output: TokenOutput) -> Sequence[int]:
        """A stop token ends the answer without being part of its text."""
        hides_last = output.stop_token_id is not None and not self._params.include_stop_str_in_output
        return output.token_ids[:-1] if hides_last else output.token_ids

    def _end(self, output: TokenOutput) -> tuple[FinishReason | None, str | int | None]:
        if self._detokenizer is not None and self._detokenizer.stop_string is not None:
            return "stop", self._detokenizer.stop_string
        is_chosen = output.stop_token_id in self._params.stop_token_ids
        return output.finish_reason, output.stop_token_id if is_chosen else None

    def _finish(self, reason: FinishReason) -> None:
        self._finish_reason = reason
        self._ended = time.monotonic()


def merge_deltas(deltas: Sequence[CompletionDelta]) -> Completion:
    """All deltas of one answer, in order, as one."""
    last = deltas[-1]
    return Completion(
        index=last.index,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        logprobs=tuple(logprob for delta in deltas for logprob in delta.logprobs),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        num_prompt_tokens=last.num_prompt_tokens,
        num_cached_tokens=last.num_cached_tokens,
    )


def _as_request_exception(failure: RequestFailure) -> MMServeError:
    """What one request lacked may be there for the next one: no reason to call the machine unfit."""
    error = as_exception(failure)
    return EngineError(error.code, error.message, param=error.param) if isinstance(error, SetupError) else error


def as_exception(failure: RequestFailure) -> MMServeError:
    """The branch of the error tree follows from the code: the sender's fault, this machine's lack, or the engine's."""
    kind: type[MMServeError] = EngineError
    if HTTP_STATUS[failure.code] < 500 and failure.code != "queue_full":
        kind = RequestError
    elif failure.code in ("model_unavailable", "missing_dependency", "insufficient_memory"):
        kind = SetupError
    return kind(failure.code, failure.message, param=failure.param)
