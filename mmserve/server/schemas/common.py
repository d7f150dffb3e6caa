"""What chat and text completions have in common: sampling fields, extras of OpenAI's clients, usage."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from mmserve.errors import RequestError
from mmserve.request import SamplingParams, StructuredOutput

FinishedReason = Literal["stop", "length", "abort", "error"]


class RequestModel(BaseModel):
    """A body of which every field is known: a misspelt option is an error, not a surprise."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class StreamOptions(RequestModel):
    include_usage: bool = Field(False, description="Send a last chunk that carries `usage` and no choices.")
    include_obfuscation: bool | None = Field(None, description="Accepted and ignored.")


class SamplingFields(RequestModel):
    """OpenAI's sampling fields, and those that vLLM's users know."""

    model: str | None = Field(None, description="A served name (see /v1/models); the first one if absent.")
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(1, description="How many answers.")
    max_tokens: int | None = None
    min_tokens: int | None = Field(0, description="End of sequence and stop tokens are held off until then.")
    temperature: float | None = Field(1.0, description="0 is greedy.")
    top_p: float | None = 1.0
    top_k: int | None = Field(0, description="0 or -1 is off.")
    min_p: float | None = 0.0
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    repetition_penalty: float | None = 1.0
    logit_bias: dict[int, float] | None = Field(None, description="Token id -> bias from -100 to 100.")
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = False
    ignore_eos: bool | None = False
    skip_special_tokens: bool | None = True
    user: str | None = Field(None, description="Accepted and ignored.")
    metadata: dict[str, Any] | None = Field(None, description="Accepted and ignored.")

    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling_params(
        self, *, max_tokens: int | None, logprobs: int | None, structured: StructuredOutput | None
    ) -> SamplingParams:
        """The validated choices; null means the default. Raises `RequestError`."""
        if self.stream_options is not None and not self.stream:
            raise RequestError(
                "invalid_request", "stream_options is only for requests with stream=true.", param="stream_options"
            )
        chosen = self.model_dump(
            exclude_none=True,
            include={
                *("n", "min_tokens", "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"),
                *("repetition_penalty", "logit_bias", "seed", "include_stop_str_in_output", "ignore_eos"),
                "skip_special_tokens",
            },
        )
        return SamplingParams(
            **chosen,
            top_k=0 if self.top_k is None or self.top_k == -1 else self.top_k,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            max_tokens=max_tokens,
            logprobs=logprobs,
            structured=structured,
        )


def refuse_unsupported(body: BaseModel, sentences: Mapping[str, str], harmless: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse fields that would change the answer's meaning, unless their value asks for nothing (null, empty, off)."""
    for name, sentence in sentences.items():
        value = getattr(body, name)
        if value in (None, False, [], {}, "") or value in harmless.get(name, ()):
            continue
        raise RequestError("invalid_request", f"{name} is not supported here: {sentence}", param=name)


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, *, prompt: int, completion: int, cached: int) -> "Usage":
        return cls(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        )


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str


class ErrorEnvelope(BaseModel):
    """How every failure is told."""

    error: ErrorBody


ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorEnvelope, "description": description}
    for status, description in {
        400: "The request cannot be served as it is.",
        404: "The model is not served here.",
        413: "The body is too large.",
        415: "The content type cannot be read.",
        429: "Too many requests wait; see Retry-After.",
        500: "A fault of the server.",
        503: "The engine is loading, dead, or shutting down; see Retry-After.",
        504: "The request took longer than the server allows.",
    }.items()
}
