"""`POST /v1/completions`."""

import asyncio
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from fastapi import APIRouter, Depends, Request, Response
from starlette.responses import JSONResponse

from mmserve.server.generation import Answer, GenerationRequest, UsageCount, collect, generate
from mmserve.server.json_body import require_json
from mmserve.server.lifetime import run_within_lifetime
from mmserve.server.logprobs import CompletionLogprobsWriter
from mmserve.server.schemas.common import COMPLETION_RESPONSES, Usage
from mmserve.server.schemas.completions import CompletionChoice, CompletionRequest, TextCompletion
from mmserve.server.sse import DONE_FRAME, EventStream, frame
from mmserve.server.state import Owner, ServerState, State, require_ready

router = APIRouter(tags=["completions"], dependencies=[Depends(require_ready), Depends(require_json)])


@dataclass(frozen=True)
class CompletionCall:
    """One request on its way: what was asked, what goes to the engine, and the head that all answers carry."""

    state: ServerState
    body: CompletionRequest
    generation: GenerationRequest
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def completion(self, choices: list[CompletionChoice]) -> TextCompletion:
        return TextCompletion(
            id=self.generation.request_id,
            object="text_completion",
            created=self.created,
            model=self.model,
            system_fingerprint=self.state.system_fingerprint,
            choices=choices,
        )

    def logprobs_writer(self) -> CompletionLogprobsWriter:
        return CompletionLogprobsWriter(self.state.engine.tokenizer)


@router.post("/v1/completions", response_model=TextCompletion, responses=COMPLETION_RESPONSES)
async def create_completion(body: CompletionRequest, request: Request, state: State, owner: Owner) -> Response:
    """Continues a text, as OpenAI's endpoint of the same name does; `stream=true` sends server-sent events."""
    call = await _start(body, state, owner)
    timeout = state.settings.request_timeout
    if body.stream:
        return EventStream(_frames(call), drain=state.drain, timeout=timeout)
    answers, usage = await run_within_lifetime(
        collect(state, call.generation), receive=request.receive, drain=state.drain, timeout=timeout
    )
    completion = call.completion([_choice(call, index, answer) for index, answer in enumerate(answers)])
    completion.usage = usage
    return JSONResponse(completion.model_dump())


async def _start(body: CompletionRequest, state: ServerState, owner: str) -> CompletionCall:
    model = state.model_name(body.model)
    params = body.to_sampling_params()
    prompts = await asyncio.to_thread(_encode, state, body.prompts())
    name = f"cmpl-{uuid.uuid4().hex}"
    generation = GenerationRequest(name, prompts, params, owner, cache_salt=body.cache_salt)
    return CompletionCall(state, body, generation, model)


def _encode(state: ServerState, prompts: list[str | list[int]]) -> list[list[int]]:
    encode = state.engine.tokenizer.encode
    return [encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt for prompt in prompts]


def _choice(call: CompletionCall, index: int, answer: Answer) -> CompletionChoice:
    return CompletionChoice(
        index=index,
        text=answer.text,
        logprobs=None if call.body.logprobs is None else call.logprobs_writer().write(answer.logprobs),
        finish_reason=answer.finish_reason,
        stop_reason=answer.stop_reason,
    )


async def _frames(call: CompletionCall) -> AsyncGenerator[str, None]:
    count = UsageCount(call.generation)
    writers: dict[int, CompletionLogprobsWriter] = defaultdict(call.logprobs_writer)
    wants_logprobs = call.body.logprobs is not None
    async with aclosing(generate(call.state, call.generation)) as deltas:
        async for index, delta in deltas:
            count.add(index, delta)
            if not (delta.text or delta.logprobs or delta.finish_reason):
                continue
            choice = CompletionChoice(
                index=index,
                text=delta.text,
                logprobs=writers[index].write(delta.logprobs) if wants_logprobs else None,
                finish_reason=delta.finish_reason,
                stop_reason=delta.stop_reason,
            )
            yield _chunk(call, [choice])
    if call.body.include_usage():
        yield _chunk(call, [], count.usage())
    yield DONE_FRAME


def _chunk(call: CompletionCall, choices: list[CompletionChoice], usage: Usage | None = None) -> str:
    chunk = call.completion(choices)
    if call.body.include_usage():
        chunk.usage = usage
    return frame(chunk)
