"""What the commands that do something with documents have in common: options on what is read, and how one is done."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmserve.commands.documents import DocumentTask, Worker
from mmserve.commands.remote import RemoteResult, RemoteServer, form_fields
from mmserve.pipelines.batch import Source
from mmserve.pipelines.events import Event, PageRead, RequestSubmitted
from mmserve.pipelines.page_views import Mode

if TYPE_CHECKING:
    from mmserve.engine.client import EngineClient
    from mmserve.engine.prompt_builder import PromptBuilder
    from mmserve.pipelines.task_options import TaskOptions
    from mmserve.pipelines.tasks import TaskName, TaskResult
    from mmserve.vision.pages import PageReader

MAX_NAME_SHOWN = 40


@dataclass(frozen=True, kw_only=True)
class ReadingOptions:
    """Which pages, as what the model gets them, and how much it may write."""

    pages: Annotated[
        str | None,
        typer.Option(metavar="PAGES", help="Only these pages of each document, such as 1-4,7,10- (the first is 1)."),
    ] = None
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer in tokens; the task decides if not given.")
    ] = None
    mode: Annotated[
        Mode,
        typer.Option(help="What the model gets: pages as pictures, as text, or the best that it takes (auto)."),
    ] = "auto"


def options_for(name: "TaskName", given: ReadingOptions, max_pages: int, **more: Any) -> "TaskOptions":
    """`more` are the task's options that are given in another way than the command's.

    Raises `RequestError` for what is wrong whatever the document: better before the model is loaded.
    """
    from mmserve.pipelines.tasks import TASKS
    from mmserve.vision.pages import parse_page_selection

    if given.pages is not None:
        parse_page_selection(given.pages, max_pages)
    return TASKS[name].options({**dataclasses.asdict(given), **more})


def document_task(name: "TaskName", options: "TaskOptions", doing: str) -> DocumentTask:
    """`doing` is what the progress bar says while the model writes, such as `summarising`."""

    def start(
        engine: "EngineClient", reader: "PageReader", prompts: "PromptBuilder", tell: Callable[[str], None]
    ) -> Worker:
        from mmserve.pipelines.tasks import TASKS

        async def work(source: Source) -> "TaskResult":
            def on_event(event: Event) -> None:
                _show(tell, source, describe(event.kind, event.to_dict(), doing))

            return await TASKS[name].run(
                source.path,
                name=source.label,
                engine=engine,
                prompts=prompts,
                reader=reader,
                options=options,
                on_event=on_event,
            )

        return work

    def start_remote(server: RemoteServer, more: Mapping[str, Any], tell: Callable[[str], None]) -> Worker:
        fields = form_fields(options, **more)

        async def work(source: Source) -> RemoteResult:
            def on_progress(kind: str, data: dict[str, Any]) -> None:
                _show(tell, source, describe(kind, data, doing))

            return await server.run(name, source, fields, on_progress)

        return work

    return DocumentTask(name, repr(options), start, start_remote)


def _show(tell: Callable[[str], None], source: Source, step: str | None) -> None:
    if step is not None:
        tell(f"{source.path.name[:MAX_NAME_SHOWN]}: {step}")


def describe(kind: str, data: Mapping[str, Any], doing: str) -> str | None:
    """An event by its kind and data, whether it was told here or by a server."""
    if kind == PageRead.kind:
        return f"page {data.get('num_read')} of {data.get('num_pages')}"
    return doing if kind == RequestSubmitted.kind else None
