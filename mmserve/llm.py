"""Offline facade: a model in this process, prompts in, answers out."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

from mmserve.config import EngineConfig, SchedulerConfig
from mmserve.engine.client import Completion, EngineClient
from mmserve.engine.prompt_factory import open_prompts
from mmserve.errors import EngineError, RequestError
from mmserve.request import SamplingParams
from mmserve.vision.decoded_picture import DecodedPicture

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
Ask = Callable[[SamplingParams], Awaitable[list[Completion]]]


class LLM:
    """`LLM("smollm2-135m").chat([{"role": "user", "content": "Hello"}])`. Close it, or use it in a `with` block.

    Works inside a running event loop too, since it has a loop of its own.
    """

    def __init__(self, model: str = "smollm2-135m", *, config: EngineConfig | None = None) -> None:
        """Load `model`, or what `config` says. Raises `SetupError`."""
        usual = EngineConfig(model=model, scheduler=SchedulerConfig.for_device("auto"))
        self._client = EngineClient.start(config or usual)
        self._prompts = open_prompts(self._client)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="llm", daemon=True)
        self._thread.start()
        try:
            self._client.wait_until_ready()
        except BaseException:
            self.close()
            raise

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[list[Completion]]:
        """The `params.n` answers to each prompt (text or token ids), in order; all are batched together."""
        token_ids = [self._encode(prompt) for prompt in _as_list(prompts)]
        return self._run([partial(self._client.complete, ids) for ids in token_ids], params)

    def chat(
        self,
        conversations: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[list[Completion]]:
        """The answers to one conversation or to many, through the model's chat template.

        A content may have pictures: parts `{"type": "image", "image": ...}`, of Pillow or uint8 `[height, width, 3]`.
        """
        many = [conversations] if conversations and isinstance(conversations[0], Mapping) else conversations
        return self._run([partial(self._chat, _with_sources(messages)) for messages in many], params)  # type: ignore[arg-type]

    def close(self) -> None:
        """Stop the engine; calls in flight raise `EngineError`. Closing twice does nothing."""
        if self._loop.is_closed():
            return
        # The engine first: what it still works on needs the pictures.
        self._client.close()
        self._prompts.close()
        asyncio.run_coroutine_threadsafe(_other_tasks_done(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self._client.tokenizer.encode(prompt, add_special_tokens=True)
        return list(prompt)

    async def _chat(self, messages: Messages, params: SamplingParams) -> list[Completion]:
        async with self._prompts.build(messages) as prompt:
            return await self._client.complete(prompt.token_ids, params, images=prompt.images)

    def _run(self, asks: list[Ask], params: SamplingParams | Sequence[SamplingParams] | None) -> list[list[Completion]]:
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(asks)
        if len(each) != len(asks):
            raise RequestError(
                "invalid_request",
                f"{len(asks)} prompts, but {len(each)} sampling parameters: give one for all, or one for each",
                param="params",
            )
        if self._loop.is_closed():
            raise EngineError("shutting_down", "this LLM was closed: make a new one")
        future = asyncio.run_coroutine_threadsafe(self._complete_all(asks, each), self._loop)
        try:
            return future.result()
        finally:
            future.cancel()

    async def _complete_all(self, asks: list[Ask], params: list[SamplingParams]) -> list[list[Completion]]:
        tasks = [asyncio.ensure_future(ask(each)) for ask, each in zip(asks, params, strict=True)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()


async def _other_tasks_done() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*tasks, return_exceptions=True)


def _with_sources(messages: Messages) -> Messages:
    """As a `PromptBuilder` takes pictures."""
    return [
        {**message, "content": [_with_source(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def _with_source(part: Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(part, Mapping) and "image" in part:
        return {"type": "image", "source": DecodedPicture(part["image"])}
    return part


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
