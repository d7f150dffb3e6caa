"""`mmserve chat`: a conversation with the model in the terminal, or one question and its answer."""

import asyncio
import contextlib
import os
import stat
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from mmserve.commands.documents import started_engine
from mmserve.commands.options import EngineOptions, SamplingOptions, VisionOptions, with_option_groups
from mmserve.commands.progress import printable, show_log
from mmserve.errors import RequestError
from mmserve.request import SamplingParams, StructuredOutput
from mmserve.vision.image_source import ImageSource
from mmserve.vision.page_types import PageLimits
from mmserve.vision.sniff import TEXT_TYPE
from mmserve.weights import hub

if TYPE_CHECKING:
    from mmserve.engine.client import EngineClient
    from mmserve.engine.prompt_builder import BuiltPrompt, PromptBuilder

CHAT_SAMPLING = SamplingOptions(temperature=0.6, top_p=0.95)
Message = dict[str, Any]
Part = dict[str, Any]
app = typer.Typer()


@app.command()
@with_option_groups
def chat(
    prompt: Annotated[
        str | None, typer.Argument(metavar="[PROMPT]", help="Answer this and end, instead of a conversation.")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", "-s", help="What the model is told beforehand.")] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(
            "--image", "-i", metavar="FILE", help="Picture or PDF that the first question is about; repeatable."
        ),
    ] = None,
    json_schema: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Answers are JSON that follows this JSON Schema.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only answers and errors on the terminal.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say more, with tracebacks.")] = False,
    sampling: SamplingOptions = CHAT_SAMPLING,
    vision: VisionOptions = VisionOptions(),  # noqa: B008
    engine: EngineOptions = EngineOptions(),  # noqa: B008
) -> None:
    """Talk to the model.

    With PROMPT, or with text piped into standard input (after the prompt, if there are both), one answer is written to
    standard output. Otherwise a conversation begins: Ctrl-C interrupts an answer, /clear begins anew, /exit or Ctrl-D
    ends it.

    \b
    Examples:
      mmserve chat
      mmserve chat "What is a purchase order?" --temperature 0
      mmserve chat "Put this plainly:" < notes.txt
      mmserve chat "Who is billed, and for how much?" --json-schema bill.json < invoice.txt
      mmserve chat --model Qwen/Qwen2.5-VL-3B-Instruct --image receipt.jpg "What is the total?"
    """
    show_log(verbose=verbose)
    params = sampling.to_params()
    if json_schema is not None:
        params = replace(params, structured=_structured(json_schema))
    vision.to_limits()
    question = _question(prompt)
    if hub.is_demo(engine.model) and not quiet:
        typer.echo(hub.DEMO_NOTICE, err=True)
    console = Console(stderr=True, quiet=quiet or not sys.stderr.isatty())
    with (
        started_engine(engine) as client,
        contextlib.closing(vision.open_prompts(client, PageLimits())) as prompts,
        asyncio.Runner() as runner,
    ):
        pictures = runner.run(_open_pictures(image or [], prompts))
        with console.status(f"Loading {engine.model}"):
            client.wait_until_ready()
        conversation = Conversation(client, prompts, params, system, pictures=pictures)
        if question is not None:
            runner.run(conversation.answer(question))
        else:
            _converse(conversation, runner)


def _structured(path: Path) -> StructuredOutput:
    """Raises `RequestError` for a file that is no JSON Schema."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(
            "invalid_schema", f"--json-schema {path} cannot be read: {error}", param="json_schema"
        ) from None
    return StructuredOutput(kind="json_schema", text=text, lenient=True, param="--json-schema")


async def _open_pictures(paths: Sequence[Path], prompts: "PromptBuilder") -> list[Part]:
    """Each picture, and each page of a document. Raises `RequestError` for a model that reads text only."""
    if not paths:
        return []
    if not prompts.reads_images:
        raise RequestError(
            "images_not_supported",
            "this model reads text only: leave --image out and take a vision-language model, or use mmserve summarize",
            param="image",
        )
    from mmserve.vision.pages import PageReader

    parts: list[Part] = []
    async with PageReader(num_workers=1) as reader:
        for path in paths:
            document = await reader.open(path)
            if document.media_type == TEXT_TYPE:
                raise RequestError("unsupported_type", f"{path} is text: pipe it in instead", param="image")
            for page in range(1, document.num_pages + 1):
                parts.append(
                    {"type": "image", "source": ImageSource(document, page), "limits": prompts.limits.or_auto()}
                )
    return parts


def _question(prompt: str | None) -> str | None:
    """The prompt and what is piped in, or None for a conversation. Raises `RequestError` if both are empty."""
    piped = sys.stdin.read() if _is_piped(wanted=prompt is None) else ""
    if prompt is None and sys.stdin.isatty():
        return None
    question = "\n\n".join(part for part in (prompt, piped.strip()) if part)
    if not question.strip():
        raise RequestError("invalid_request", "there is nothing to answer: give a PROMPT, or pipe text in")
    return question


def _is_piped(*, wanted: bool) -> bool:
    """Whether to read standard input. Beside a prompt only a pipe or a file is: a service's input may never end."""
    if sys.stdin.isatty():
        return False
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except OSError:
        return wanted
    return wanted or stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


@dataclass
class Conversation:
    """The messages so far; the oldest are forgotten when the context is full."""

    client: "EngineClient"
    prompts: "PromptBuilder"
    params: SamplingParams
    system: str | None = None
    messages: list[Message] = field(default_factory=list)
    pictures: list[Part] = field(default_factory=list)

    async def answer(self, question: str) -> None:
        """Stream the answer to standard output, and remember both; of an interrupted answer what there is of it.

        Raises `RequestError` (`context_length_exceeded`) for a question too long by itself.
        """
        content = [*self.pictures, {"type": "text", "text": question}] if self.pictures else question
        self.messages.append({"role": "user", "content": content})
        pieces: list[str] = []
        try:
            async with (
                self._prompt() as prompt,
                contextlib.aclosing(
                    self.client.generate(prompt.token_ids, self.params, images=prompt.images)
                ) as deltas,
            ):
                async for delta in deltas:
                    pieces.append(delta.text)
                    _write(delta.text)
                    if delta.finish_reason == "length":
                        typer.echo("\n[cut off: --max-tokens or the context's end was reached]", err=True, nl=False)
        except BaseException:
            if not pieces:
                self.messages.pop()
            raise
        finally:
            if pieces:
                self.pictures = []
                self.messages.append({"role": "assistant", "content": "".join(pieces)})
                _write("\n")

    @contextlib.asynccontextmanager
    async def _prompt(self) -> AsyncIterator["BuiltPrompt"]:
        room = self.client.max_model_len - (self.params.max_tokens or 1)
        while True:
            async with self.prompts.build(self._with_system()) as prompt:
                if len(prompt.token_ids) <= room or len(self.messages) <= 1:
                    yield prompt
                    return
            del self.messages[:2]

    def _with_system(self) -> list[Message]:
        start = [] if self.system is None else [{"role": "system", "content": self.system}]
        return start + self.messages


def _converse(conversation: Conversation, runner: asyncio.Runner) -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (editing and history for input())
    typer.echo("Ctrl-C interrupts an answer; /clear begins anew; /exit ends.", err=True)
    for line in _lines():
        if line == "/exit":
            return
        if line == "/clear":
            conversation.messages.clear()
            continue
        try:
            runner.run(conversation.answer(line))
        except KeyboardInterrupt:
            typer.echo("\n[interrupted]", err=True)
        except RequestError as error:
            typer.echo(f"mmserve: {error}", err=True)


def _lines() -> Iterator[str]:
    """What the user types, until Ctrl-D."""
    while True:
        try:
            line = input("> ").strip()
        except KeyboardInterrupt:
            typer.echo("\n/exit or Ctrl-D ends.", err=True)
            continue
        except EOFError:
            typer.echo(err=True)
            return
        if line:
            yield line


def _write(text: str) -> None:
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()
