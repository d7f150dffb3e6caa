"""`/v1/chat/completions`: the body, the answer, and the chunks of a streamed answer."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from mmserve.errors import RequestError
from mmserve.request import SamplingParams
from mmserve.server.schemas.common import USAGE_EXAMPLE, FinishedReason, SamplingFields, Usage, refuse_unsupported
from mmserve.server.schemas.content import ContentPart, MediaPart, Part
from mmserve.server.schemas.structured import StructuredFields

NO_TOOLS = "this server calls no tools; describe what you want in the messages."
UNSUPPORTED = {
    "tools": NO_TOOLS,
    "tool_choice": NO_TOOLS,
    "functions": NO_TOOLS,
    "function_call": NO_TOOLS,
    "modalities": "answers are text only.",
    "audio": "answers are text only.",
    "web_search_options": "this server searches nothing; put the text into the messages.",
}
HARMLESS = {
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
}
# "self" is no name that a function could be called with.
TEMPLATE_ARGUMENTS_OF_OURS = {
    *("messages", "conversation", "add_generation_prompt", "tools", "documents", "tokenize", "self"),
}


class ChatMessage(BaseModel):
    """One message. Fields that answers carry (`refusal`, `tool_calls`, ...) may be sent back when they are empty."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None

    def for_template(self, position: int) -> dict[str, Any]:
        """The message as chat templates know it, save for its `MediaPart`s. Raises `RequestError`."""
        where = f"messages[{position}]"
        if self.role in ("tool", "function") or self.tool_calls:
            raise RequestError("invalid_request", f"{where}: {NO_TOOLS}", param=where)
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": self._content(where)}
        return message if self.name is None else {**message, "name": self.name}

    def _content(self, where: str) -> "str | list[Part]":
        if isinstance(self.content, str):
            return self.content
        if self.content is None:
            if self.role == "assistant":
                return ""
            raise RequestError("invalid_request", f"{where} has no content.", param=where)
        parts = [part.read(f"{where}.content[{i}]") for i, part in enumerate(self.content)]
        texts = [part["text"] for part in parts if not isinstance(part, MediaPart)]
        return "\n".join(texts) if len(texts) == len(parts) else parts


class ChatCompletionRequest(StructuredFields, SamplingFields):
    model_config = ConfigDict(
        json_schema_extra={
            "example": {"messages": [{"role": "user", "content": "What is a purchase order?"}], "max_tokens": 64}
        }
    )

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, description="As max_tokens, which it overrides.")
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, description="Alternatives per token, 0 to 20; needs logprobs=true.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Switches that the chat template knows.")
    max_pixels: int | None = Field(None, description="Scale each picture and page down to this many pixels.")
    min_pixels: int | None = Field(None, description="Scale each picture and page up to this many pixels.")

    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    web_search_options: Any = None

    store: bool | None = Field(None, description="Accepted and ignored.")
    service_tier: str | None = Field(None, description="Accepted and ignored.")
    safety_identifier: str | None = Field(None, description="Accepted and ignored.")
    prompt_cache_key: str | None = Field(None, description="Accepted and ignored.")
    prompt_cache_retention: str | None = Field(None, description="Accepted and ignored.")
    parallel_tool_calls: bool | None = Field(None, description="Accepted and ignored.")
    reasoning_effort: str | None = Field(None, description="Accepted and ignored.")
    verbosity: str | None = Field(None, description="Accepted and ignored.")
    prediction: Any = Field(None, description="Accepted and ignored.")

    def to_sampling_params(self) -> SamplingParams:
        refuse_unsupported(self, UNSUPPORTED, HARMLESS)
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("invalid_request", "top_logprobs needs logprobs=true.", param="top_logprobs")
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self.sampling_params(
            max_tokens=max_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            structured=self.structured_output(),
        )

    def template_messages(self) -> list[dict[str, Any]]:
        return [message.for_template(position) for position, message in enumerate(self.messages)]

    def template_arguments(self) -> dict[str, Any]:
        arguments = self.chat_template_kwargs or {}
        for name in arguments:
            if name in TEMPLATE_ARGUMENTS_OF_OURS or not name.isidentifier():
                raise RequestError(
                    "invalid_request", f"chat_template_kwargs cannot set {name!r}.", param="chat_template_kwargs"
                )
        return arguments


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatTokenLogprob]
    refusal: None = None


class AnswerMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishedReason
    stop_reason: str | int | None


class ChatCompletion(BaseModel):
    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "id": "chatcmpl-1f7d52c6a810",
                "object": "chat.completion",
                "created": 1767225600,
                "model": "smollm2-135m",
                "system_fingerprint": "fp_0123456789",
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": "A buyer's order.", "refusal": None},
                        "logprobs": None,
                        "finish_reason": "stop",
                        "stop_reason": None,
                    }
                ],
                "usage": USAGE_EXAMPLE,
            }
        }
    )

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str = ""


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishedReason | None
    stop_reason: str | int | None = None


class ChatCompletionChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
