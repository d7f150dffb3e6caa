"""`POST /v1/chat/completions`."""

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Depends, Request, Response
from starlette.responses import JSONResponse

from mmserve.request import SamplingParams
from mmserve.server.generation import Answer, GenerationRequest, UsageCount, collect, generate
from mmserve.server.json_body import require_json
from mmserve.server.lifetime import run_within_lifetime
from mmserve.server.logprobs import chat_logprobs
from mmserve.server.media import received
from mmserve.server.schemas.chat import (
    AnswerMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatDelta,
)
from mmserve.server.schemas.common import COMPLETION_RESPONSES, Usage
from mmserve.server.sse import DONE_FRAME, EventStream, frame
from mmserve.server.state import Owner, ServerState, State, require_ready

if TYPE_CHECKING:
    from mmserve.engine.client import CompletionDelta

router = APIRouter(tags=["completions"], dependencies=[Depends(require_ready), Depends(require_json)])


@dataclass(frozen=True)
class ChatTurn:
    """One request on its way: what was asked, and the head that all answers carry."""

    state: ServerState
    body: ChatCompletionRequest
    messages: list[dict[str, Any]]
    params: SamplingParams
    model: str
    owner: str
    request_id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def head(self) -> dict[str, Any]:
        return {
            "id": self.request_id,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.state.system_fingerprint,
        }


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=COMPLETION_RESPONSES)
async def create_chat_completion(body: ChatCompletionRequest, request: Request, state: State, owner: Owner) -> Response:
    """Answers a conversation, as OpenAI's endpoint of the same name does; `stream=true` sends server-sent events."""
    turn = _start(body, state, owner)
    timeout = state.settings.request_timeout
    if body.stream:
        return EventStream(_frames(turn), drain=state.drain, timeout=timeout)
    answers, usage = await run_within_lifetime(
        _answers(turn), receive=request.receive, drain=state.drain, timeout=timeout
    )
    choices = [_choice(turn, index, answer) for index, answer in enumerate(answers)]
    return JSONResponse(ChatCompletion(**turn.head, choices=choices, usage=usage).model_dump())


def _start(body: ChatCompletionRequest, state: ServerState, owner: str) -> ChatTurn:
    model = state.model_name(body.model)
    params = body.to_sampling_params()
    body.template_arguments()
    return ChatTurn(state, body, body.template_messages(), params, model, owner)


@asynccontextmanager
async def _prepared(turn: ChatTurn) -> AsyncIterator[GenerationRequest]:
    """What goes to the engine, with its pictures for as long as the block lasts."""
    state, body = turn.state, turn.body
    prompts = state.prompts_for(turn.owner, body.cache_salt)
    limits = prompts.limits.narrowed(min_pixels=body.min_pixels, max_pixels=body.max_pixels)
    async with AsyncExitStack() as stack:
        with state.gate.admit(turn.params.n, turn.owner):
            async with received(state, turn.messages, limits, turn.owner) as messages:
                room = state.engine.max_model_len - 1
                built = prompts.build(messages, max_tokens=room, template_arguments=body.template_arguments())
                prompt = await stack.enter_async_context(built)
        yield GenerationRequest(
            turn.request_id, [prompt.token_ids], turn.params, turn.owner, prompt.images, body.cache_salt
        )


async def _answers(turn: ChatTurn) -> tuple[list[Answer], Usage]:
    async with _prepared(turn) as generation:
        return await collect(turn.state, generation)


def _choice(turn: ChatTurn, index: int, answer: Answer) -> ChatChoice:
    logprobs = chat_logprobs(turn.state.engine.tokenizer, answer.logprobs) if turn.body.logprobs else None
    return ChatChoice(
        index=index,
        message=AnswerMessage(content=answer.text),
        logprobs=logprobs,
        finish_reason=answer.finish_reason,
        stop_reason=answer.stop_reason,
    )


async def _frames(turn: ChatTurn) -> AsyncGenerator[str, None]:
    async with _prepared(turn) as generation:
        count = UsageCount(generation)
        introduced: set[int] = set()
        async with aclosing(generate(turn.state, generation)) as deltas:
            async for index, delta in deltas:
                count.add(index, delta)
                if index not in introduced:
                    introduced.add(index)
                    opening = ChatDelta(role="assistant", content="")
                    yield _chunk(turn, ChatChunkChoice(index=index, delta=opening, logprobs=None, finish_reason=None))
                if delta.text or delta.logprobs or delta.finish_reason:
                    yield _chunk(turn, _chunk_choice(turn, index, delta))
    if turn.body.include_usage():
        yield _chunk(turn, None, count.usage())
    yield DONE_FRAME


def _chunk_choice(turn: ChatTurn, index: int, delta: "CompletionDelta") -> ChatChunkChoice:
    wants_logprobs = turn.body.logprobs and delta.logprobs
    choice = ChatChunkChoice(
        index=index,
        delta=ChatDelta(content=delta.text) if delta.text else ChatDelta(),
        logprobs=chat_logprobs(turn.state.engine.tokenizer, delta.logprobs) if wants_logprobs else None,
        finish_reason=delta.finish_reason,
    )
    if delta.finish_reason is not None:
        choice.stop_reason = delta.stop_reason
    return choice


def _chunk(turn: ChatTurn, choice: ChatChunkChoice | None, usage: Usage | None = None) -> str:
    chunk = ChatCompletionChunk(**turn.head, object="chat.completion.chunk", choices=[] if choice is None else [choice])
    if turn.body.include_usage():
        chunk.usage = usage
    return frame(chunk)
