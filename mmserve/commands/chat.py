"""`mmserve chat`: a conversation with the model in the terminal, or one question and its answer."""

import asyncio
import contextlib
import os
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from mmserve.commands.documents import started_engine
from mmserve.commands.options import EngineOptions, SamplingOptions, with_option_groups
from mmserve.commands.progress import printable, show_log
from mmserve.errors import RequestError
from mmserve.request import SamplingParams
from mmserve.weights import hub

if TYPE_CHECKING:
    from mmserve.engine.client import EngineClient

CHAT_SAMPLING = SamplingOptions(temperature=0.6, top_p=0.95)
Message = dict[str, str]
app = typer.Typer()


@app.command()
@with_option_groups
def chat(
    prompt: Annotated[
        str | None, typer.Argument(metavar="[PROMPT]", help="Answer this and end, instead of a conversation.")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", "-s", help="What the model is told beforehand.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only answers and errors on the terminal.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say more, with tracebacks.")] = False,
    sampling: SamplingOptions = CHAT_SAMPLING,
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
    """
    show_log(verbose=verbose)
    params = sampling.to_params()
    question = _question(prompt)
    if hub.is_demo(engine.model) and not quiet:
        typer.echo(hub.DEMO_NOTICE, err=True)
    console = Console(stderr=True, quiet=quiet or not sys.stderr.isatty())
    with started_engine(engine) as client, asyncio.Runner() as runner:
        with console.status(f"Loading {engine.model}"):
            client.wait_until_ready()
        conversation = Conversation(client, params, system)
        if question is not None:
            runner.run(conversation.answer(question))
        else:
            _converse(conversation, runner)


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
    params: SamplingParams
    system: str | None = None
    messages: list[Message] = field(default_factory=list)

    async def answer(self, question: str) -> None:
        """Stream the answer to standard output, and remember both; of an interrupted answer what there is of it.

        Raises `RequestError` (`context_length_exceeded`) for a question too long by itself.
        """
        self.messages.append({"role": "user", "content": question})
        pieces: list[str] = []
        try:
            async with contextlib.aclosing(self.client.generate(self._prompt_token_ids(), self.params)) as deltas:
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
                self.messages.append({"role": "assistant", "content": "".join(pieces)})
                _write("\n")

    def _prompt_token_ids(self) -> list[int]:
        room = self.client.max_model_len - (self.params.max_tokens or 1)
        while True:
            token_ids: list[int] = self.client.tokenizer.encode_chat(self._with_system())
            if len(token_ids) <= room or len(self.messages) <= 1:
                return token_ids
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
