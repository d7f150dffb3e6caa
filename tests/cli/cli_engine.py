"""An engine that gives one answer to everything, in the place of the real one."""

import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from typing import Any

from mmserve.commands import documents
from mmserve.commands.options import EngineOptions
from mmserve.config import EngineConfig
from mmserve.engine.client import CompletionDelta
from mmserve.request import ImageSpan, SamplingParams

INVOICE = "Invoice 2025-0417 of Kestrel Instrument Works. The amount of 1,480 pounds is due on 3 May 2025."
ANSWER = "The amount of 1,480 pounds is due on 3 May 2025."


class ByteTokenizer:
    def encode(self, text: str, *, add_special_tokens: bool = False, parse_special: bool = True) -> list[int]:
        return list(text.encode())

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **template_kwargs: Any
    ) -> list[int]:
        return self.encode("\n".join(message["content"] for message in messages))


class ScriptedEngine:
    image_processor = None

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.tokenizer = ByteTokenizer()
        self.max_model_len = 16_000
        self.prompts: list[str] = []

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        images: Sequence[ImageSpan] = (),
    ) -> AsyncGenerator[CompletionDelta, None]:
        self.prompts.append(bytes(prompt_token_ids).decode())
        yield CompletionDelta(0, ANSWER, (1, 2, 3), (), "stop", None, len(prompt_token_ids), 0)


def install(replace: Callable[[object, str, object], None]) -> list[ScriptedEngine]:
    """Make commands over documents use it; the list has the engines that were started."""
    started: list[ScriptedEngine] = []

    @contextlib.contextmanager
    def start(options: EngineOptions) -> Iterator[ScriptedEngine]:
        started.append(ScriptedEngine(options.to_config()))
        yield started[-1]

    replace(documents, "started_engine", start)
    return started
