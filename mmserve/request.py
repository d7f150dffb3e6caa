"""What travels through the engine for one request: the user's choices, the tokens, the progress."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, Protocol, get_args

from mmserve.errors import RequestError

FinishReason = Literal["stop", "length", "abort", "error"]
StructuredKind = Literal["json_schema", "json_object", "regex", "choice", "grammar"]
MAX_LOGPROBS = 20
MAX_STRUCTURED_LENGTH = 2**17
MAX_CHOICES = 1024


def _require(condition: bool, param: str, sentence: str) -> None:
    if not condition:
        raise RequestError("invalid_request", f"{param} {sentence}", param=param)


@dataclass(frozen=True, kw_only=True)
class StructuredOutput:
    """The form that an answer has to have, whatever the model would rather say.

    `text` is a JSON Schema as JSON (`json_schema`), nothing (`json_object`), a regular expression of the whole answer
    (`regex`), a JSON array of strings, one of which is the answer (`choice`), or a grammar in Lark's or GBNF's notation
    (`grammar`). Raises `invalid_schema` for what is not even that; whether it can be followed is found out when the
    engine compiles it. With `lenient` what a schema asks for and the engine cannot enforce (`uniqueItems`, `if`) is
    left to the caller to check; without, such a schema is refused. `param` is the field in which the user has given it,
    which errors name.
    """

    kind: StructuredKind
    text: str = ""
    lenient: bool = False
    param: str = field(default="structured", compare=False)

    def __post_init__(self) -> None:
        self._check(self.kind in get_args(StructuredKind), f"knows no kind {self.kind!r}")
        self._check(self.kind != "json_object" or not self.text, "takes no text for a json_object")
        self._check(self.kind == "json_object" or bool(self.text), "must not be empty")
        length = len(self.text)
        self._check(length <= MAX_STRUCTURED_LENGTH, f"is {length} characters long, over {MAX_STRUCTURED_LENGTH}")
        if self.kind == "json_schema":
            self._check(isinstance(self._from_json(), dict), "must be a JSON Schema that is an object")
        elif self.kind == "choice":
            self._check_choices(self._from_json())

    def _from_json(self) -> object:
        try:
            return json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise RequestError("invalid_schema", f"{self.param} is not JSON: {error}", param=self.param) from None

    def _check_choices(self, choices: object) -> None:
        self._check(
            isinstance(choices, list) and all(isinstance(choice, str) and choice for choice in choices),
            "must be a list of strings, none of them empty",
        )
        assert isinstance(choices, list)
        self._check(1 <= len(choices) <= MAX_CHOICES, f"takes 1 to {MAX_CHOICES} choices, not {len(choices)}")

    def _check(self, condition: bool, sentence: str) -> None:
        if not condition:
            raise RequestError("invalid_schema", f"{self.param} {sentence}", param=self.param)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """A user's choices for one request, validated at construction (`invalid_request` names the field).

    `temperature == 0` is greedy. `top_k == 0` and `top_p == 1` are off. `max_tokens is None` means up to the context's
    end. `logprobs` is the number of alternatives wanted beside the sampled token (0 to 20), None for no logprobs.
    `stop` strings are cut from the text; `stop_token_ids` end generation like an end-of-sequence token. With
    `detokenize=False` answers have token ids and no text, which spares the work of making it; no `stop` strings then.

    With `structured` only tokens that lead to the wanted form can be chosen, before any other choice is made. Where the
    form is complete the answer ends ("stop"), whatever `ignore_eos` and `min_tokens` say; an answer that `max_tokens`
    cuts ("length") is not complete. `stop` strings cut it, too.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    structured: StructuredOutput | None = None

    def __post_init__(self) -> None:
        self._check_lengths()
        self._check_sampling()

    def check_fits(self, num_prompt_tokens: int, max_model_len: int) -> None:
        """Raises `RequestError` (`context_length_exceeded`) where prompt and answer are longer than the context."""
        if num_prompt_tokens + (self.max_tokens or 1) > max_model_len:
            raise RequestError(
                "context_length_exceeded",
                f"the prompt has {num_prompt_tokens} tokens and {self.max_tokens or 'at least 1'} more are asked for,"
                f" but the context holds {max_model_len}: shorten the prompt, lower max_tokens, or start with a"
                " larger --max-model-len",
                param="max_tokens" if num_prompt_tokens < max_model_len else "prompt",
            )

    def _check_lengths(self) -> None:
        _require(1 <= self.n <= 128, "n", "must be between 1 and 128")
        _require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "must be at least 1")
        _require(self.min_tokens >= 0, "min_tokens", "must not be negative")
        _require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens, "min_tokens", "must not exceed max_tokens"
        )
        _require(
            self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
            "logprobs",
            f"must be between 0 and {MAX_LOGPROBS}",
        )
        _require(len(self.stop) <= 16 and all(self.stop), "stop", "takes up to 16 strings, none of them empty")
        _require(self.detokenize or not self.stop, "stop", "strings are looked for in text: leave detokenize on")

    def _check_sampling(self) -> None:
        _require(0.0 <= self.temperature <= 100.0, "temperature", "must be between 0 and 100")
        _require(0.0 < self.top_p <= 1.0, "top_p", "must be above 0 and at most 1")
        _require(self.top_k >= 0, "top_k", "must be 0 (off) or a positive number of tokens")
        _require(0.0 <= self.min_p <= 1.0, "min_p", "must be between 0 and 1")
        _require(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "must be between -2 and 2")
        _require(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "must be between -2 and 2")
        _require(0.0 < self.repetition_penalty <= 100.0, "repetition_penalty", "must be above 0 and at most 100")
        _require(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", "must fit 64 bits")
        _require(len(self.logit_bias) <= 1024, "logit_bias", "takes up to 1024 tokens")
        for bias in self.logit_bias.values():
            _require(
                math.isfinite(bias) and -100.0 <= bias <= 100.0, "logit_bias", "values must be between -100 and 100"
            )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def is_repeatable(self) -> bool:
        """Whether the same question has the same answer."""
        return self.is_greedy or self.seed is not None

    @property
    def needs_last_token(self) -> bool:
        """Whether a choice depends on the tokens chosen before it by more than their number."""
        has_penalties = self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0
        return has_penalties or self.structured is not None


@dataclass(frozen=True)
class TokenLogprob:
    """A token's log-probability before penalties and temperature, and the most likely alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class SampledToken:
    """One token and, where it was asked for, its log-probability."""

    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True)
class PatchesRef:
    """Where an image's preprocessed pixels lie: a shared-memory segment that outlives the request, and their layout.

    `layout` is what the family's encoder needs beside the pixels (grid of patches, tiles, original size).
    """

    segment: str
    shape: tuple[int, ...]
    dtype: str
    layout: tuple[int, ...] = ()


@dataclass(frozen=True)
class ImageSpan:
    """Where an image's tokens sit in the prompt, and the digest that is the image's identity.

    `grid` is (rows, columns) of its tokens, for models whose positions have three axes.
    """

    offset: int
    length: int
    content_hash: bytes
    grid: tuple[int, int] | None = None
    patches: PatchesRef | None = None

    @property
    def end(self) -> int:
        return self.offset + self.length


class TokenMatcher(Protocol):
    """Follows a sequence's output tokens through the form that its answer has to have."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow any more."""

    def accept(self, token_id: int) -> None:
        """Take the next output token. Raises `RequestError` where the answer cannot go on."""


class SequenceStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """One request's tokens and progress.

    `num_computed_tokens` of them have their K and V in `block_ids`, or will have before any step launched from now on.
    `num_pending_tokens` more were sampled by steps whose results are still to come. Blocks are shared only with
    sequences of the same `cache_salt`. `encodings` give the seconds of the steps that encoded its images, once it has a
    token. `matcher` has seen all output tokens; where the answer has a form, it comes when that is compiled.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int = 0
    images: tuple[ImageSpan, ...] = ()
    arrival_time: float = 0.0
    cache_salt: bytes = b""
    output_token_ids: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_published_blocks: int = 0
    num_computed_tokens: int = 0
    num_pending_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    encodings: list[Callable[[], float]] = field(default_factory=list)
    status: SequenceStatus = SequenceStatus.WAITING
    matcher: TokenMatcher | None = None

    @property
    def is_compiling(self) -> bool:
        return self.params.structured is not None and self.matcher is None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.output_token_ids

    def tokens(self, start: int, stop: int) -> list[int]:
        """Tokens `start` up to `stop` of prompt and output, without copying the whole."""
        split = len(self.prompt_token_ids)
        if stop <= split:
            return self.prompt_token_ids[start:stop]
        return self.prompt_token_ids[start:split] + self.output_token_ids[max(start - split, 0) : stop - split]
