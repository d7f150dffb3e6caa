"""`mmserve shout`: a command over documents that needs no model. Run as a script, it is part of the whole mmserve."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Annotated, Any

import typer
from typer.testing import Result

from mmserve import cli
from mmserve.commands import documents
from mmserve.commands.documents import BatchCommandOptions, DocumentPaths, DocumentTask, ModelOptions, Worker, run_task
from mmserve.commands.options import DocumentOptions, EngineOptions, with_option_groups
from mmserve.errors import DocumentError, EngineError, SetupError
from mmserve.pipelines.batch import Source
from mmserve.pipelines.events import PageReport

Invoke = Callable[..., Result]
app = typer.Typer()
events: list[str] = []
# How often a document that is busy is refused yet.
num_refused = 0


@dataclass(frozen=True)
class Shout:
    name: str
    text: str
    pages: tuple[PageReport, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "text": self.text, "num_pages": len(asdict(self)["pages"])}

    def to_markdown(self) -> str:
        return f"# {self.name}\n\n{self.text}\n"


def _refuse() -> None:
    global num_refused
    num_refused -= 1
    if num_refused >= 0:
        raise EngineError("queue_full", "Too many requests wait.")


def start(_engine: object, _reader: object, _prompts: object, tell: Callable[[str], None]) -> Worker:
    async def shout(source: Source) -> Shout:
        tell(f"Shouting {source.name}")
        text = source.path.read_text()
        if text.startswith("bad"):
            raise DocumentError("corrupt_document", "It is cut off.")
        if text.startswith("pause"):
            await asyncio.sleep(0.005)
        if text.startswith("busy"):
            _refuse()
        if text.startswith("slow"):
            print("waiting", file=sys.stderr, flush=True)
            await asyncio.sleep(60)
        problem = DocumentError("page_too_large", "It is too large.") if text.startswith("large") else None
        reports = PageReport(1, "text_layer", False), PageReport(2, "text_layer", False, problem)
        return Shout(source.name, text.upper(), reports)

    return shout


def start_remote(_server: object, _fields: object, _tell: object) -> Worker:
    raise NotImplementedError("no server shouts")


@app.command()
@with_option_groups
def shout(
    paths: DocumentPaths,
    files: BatchCommandOptions,
    engine: EngineOptions,
    pages: DocumentOptions,
    greeting: Annotated[str, typer.Option(help="Tells one run from another.")] = "hello",
) -> None:
    """Shout what documents say."""
    run_task(paths, DocumentTask("shout", greeting, start, start_remote), files, ModelOptions(engine, pages))


@contextlib.contextmanager
def fake_engine(options: EngineOptions) -> Iterator[object]:
    if options.model == "missing":
        raise SetupError("model_unavailable", "there is no model 'missing'")
    events.append(f"start {options.model} {options.max_num_seqs} {options.enable_prefix_caching}")
    try:
        yield SimpleNamespace(tokenizer=None, image_processor=None)
    finally:
        events.append("close")


@contextlib.asynccontextmanager
async def fake_reader(_options: DocumentOptions) -> AsyncIterator[object]:
    yield object()


def install(replace: Callable[[object, str, object], None]) -> None:
    """Make `shout` a command, and engine and reader harmless; `replace` is `setattr`, or one that is undone later."""
    events.clear()
    sys.modules["mmserve.commands.shout"] = sys.modules[__name__]
    replace(cli, "COMMANDS", {**cli.COMMANDS, "shout": "Shout what documents say."})
    replace(documents, "started_engine", fake_engine)
    replace(DocumentOptions, "open_reader", fake_reader)


if __name__ == "__main__":
    install(setattr)
    cli.main()
