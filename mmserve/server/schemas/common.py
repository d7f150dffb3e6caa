"""What chat and text completions have in common: sampling fields, extras of OpenAI's clients, usage."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mmserve.errors import RequestError
from mmserve.request import SamplingParams, StructuredOutput
from mmserve.server.errors import from_validation

FinishedReason = Literal["stop", "length", "abort", "error"]


class RequestModel(BaseModel):
    """A body of which every field is known: a misspelt option is an error, not a surprise."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Raises `RequestError` that names the field."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise from_validation(error.errors()) from None


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
    cache_salt: str | None = Field(
        None, min_length=1, max_length=256, description="Requests of another salt share nothing of the prefix cache."
    )
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


USAGE_EXAMPLE: dict[str, Any] = {
    "prompt_tokens": 12,
    "completion_tokens": 6,
    "total_tokens": 18,
    "prompt_tokens_details": {"cached_tokens": 0},
}


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

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "error": {
                    "message": "length must be short, medium or long",
                    "type": "invalid_request_error",
                    "param": "length",
                    "code": "invalid_request",
                }
            }
        }
    )

    error: ErrorBody


EVENT_STREAM: Mapping[str, Any] = {
    "text/event-stream": {
        "schema": {"description": "Server-sent events."},
        "example": 'event: delta\ndata: {"type":"delta","index":0,"name":"a.pdf","text":"The total is "}\n\n',
    }
}
CHUNK_STREAM: Mapping[str, Any] = {
    "text/event-stream": {
        "schema": {"description": "Server-sent events: chunks, and [DONE]."},
        "example": 'data: {"id":"1","object":"...","created":1767225600,"model":"m","choices":[]}\n\ndata: [DONE]\n\n',
    }
}
_DESCRIPTIONS = {
    400: "The request cannot be served as it is.",
    401: "The server needs an API key, and this is none that it knows.",
    403: "Without API keys: a name that the server does not answer to, or a page of another site.",
    404: "What is named is not here.",
    408: "The body stopped arriving.",
    409: "The idempotency key was used for another request.",
    413: "The body or the document is too large.",
    415: "The content type, or the type of a document, cannot be read.",
    422: "The document is damaged, empty or protected by a password.",
    429: "Too many requests wait, or came in a short time; see Retry-After.",
    500: "A fault of the server.",
    503: "The engine is loading, dead, or shutting down, or storage cannot be had; see Retry-After.",
    504: "The request took longer than the server allows.",
    507: "The server's disk is full.",
}


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """What `/docs` says of these statuses."""
    return {status: {"model": ErrorEnvelope, "description": _DESCRIPTIONS[status]} for status in statuses}


# Where files or the database may be out of reach.
STORAGE_STATUSES = (500, 503)
ERROR_RESPONSES = error_responses(400, 404, 408, 413, 415, 422, 429, 500, 503, 504)
COMPLETION_RESPONSES = {200: {"content": {**CHUNK_STREAM}}, **ERROR_RESPONSES}
ACCESS_RESPONSES = error_responses(401, 403, 429)
