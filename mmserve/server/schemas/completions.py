"""`/v1/completions`: the body, the answer, and the chunks of a streamed answer."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from mmserve.errors import RequestError
from mmserve.request import SamplingParams
from mmserve.server.schemas.common import USAGE_EXAMPLE, FinishedReason, SamplingFields, Usage, refuse_unsupported
from mmserve.server.schemas.structured import StructuredFields

DEFAULT_MAX_TOKENS = 16
UNSUPPORTED = {
    "echo": "an answer does not repeat its prompt; put the two together on your side.",
    "suffix": "the models served here do not fill gaps.",
    "best_of": "ask for n answers and choose among them.",
}


class CompletionRequest(StructuredFields, SamplingFields):
    model_config = ConfigDict(json_schema_extra={"example": {"prompt": "Once upon a time", "max_tokens": 16}})

    prompt: str | list[str] | list[int] | list[list[int]] = Field(
        description="Text, several texts, token ids, or several lists of token ids."
    )
    max_tokens: int | None = DEFAULT_MAX_TOKENS
    logprobs: int | None = Field(None, description="Alternatives per token, 0 to 20.")
    echo: bool | None = False
    suffix: str | None = None
    best_of: int | None = None

    def to_sampling_params(self) -> SamplingParams:
        refuse_unsupported(self, UNSUPPORTED, {"best_of": (self.n or 1,)})
        max_tokens = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        return self.sampling_params(max_tokens=max_tokens, logprobs=self.logprobs, structured=self.structured_output())

    def prompts(self) -> list[str | list[int]]:
        """One entry a prompt. Raises `RequestError` where one is empty."""
        if isinstance(self.prompt, str):
            prompts: list[Any] = [self.prompt]
        else:
            prompts = [self.prompt] if self.prompt and isinstance(self.prompt[0], int) else list(self.prompt)
        if not prompts or not all(prompts):
            raise RequestError("invalid_request", "prompt must not be empty.", param="prompt")
        return prompts


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishedReason | None
    stop_reason: str | int | None


class TextCompletion(BaseModel):
    """The whole answer, and each chunk of a streamed one."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "id": "cmpl-1f7d52c6a810",
                "object": "text_completion",
                "created": 1767225600,
                "model": "smollm2-135m",
                "system_fingerprint": "fp_0123456789",
                "choices": [
                    {"index": 0, "text": ", a ship", "logprobs": None, "finish_reason": "length", "stop_reason": None}
                ],
                "usage": USAGE_EXAMPLE,
            }
        }
    )

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
