"""`mmserve summarize`: documents in, summaries with page citations out."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmserve.commands.documents import BatchCommandOptions, Task, TaskOptions, Worker, run_task
from mmserve.commands.options import DocumentOptions, EngineOptions, VisionOptions, with_option_groups
from mmserve.pipelines.batch import Source
from mmserve.pipelines.events import Event, PageRead, RequestSubmitted
from mmserve.pipelines.page_views import Mode
from mmserve.pipelines.prompts import Length

if TYPE_CHECKING:
    from mmserve.engine.client import EngineClient
    from mmserve.engine.prompt_builder import PromptBuilder
    from mmserve.pipelines.summarize import SummarizeOptions
    from mmserve.vision.pages import PageReader

MAX_NAME_SHOWN = 40
app = typer.Typer()


@dataclass(frozen=True, kw_only=True)
class SummaryOptions:
    """What the summary is about, and how long it is."""

    pages: Annotated[
        str | None,
        typer.Option(metavar="PAGES", help="Only these pages of each document, such as 1-4,7,10- (the first is 1)."),
    ] = None
    length: Annotated[Length, typer.Option(help="How much to write.")] = "medium"
    language: Annotated[
        str | None, typer.Option(help="Language of the summary, such as German; the document's own if not given.")
    ] = None
    prompt: Annotated[str | None, typer.Option(help="What to pay attention to.")] = None
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer in tokens; --length decides if not given.")
    ] = None

    mode: Annotated[
        Mode,
        typer.Option(help="What the model gets: pages as pictures, as text, or the best that it takes (auto)."),
    ] = "auto"

    def to_options(self, max_pages: int) -> "SummarizeOptions":
        """Raises `RequestError` for what is wrong whatever the document: better before the model is loaded."""
        from mmserve.pipelines.summarize import SummarizeOptions
        from mmserve.vision.pages import parse_page_selection

        if self.pages is not None:
            parse_page_selection(self.pages, max_pages)
        return SummarizeOptions(**dataclasses.asdict(self))


@app.command()
@with_option_groups
def summarize(
    paths: Annotated[
        list[Path], typer.Argument(metavar="FILE|DIR|-...", help="Documents, folders of them, or - for standard input.")
    ],
    summary: SummaryOptions = SummaryOptions(),
    files: BatchCommandOptions = BatchCommandOptions(),  # noqa: B008
    documents: DocumentOptions = DocumentOptions(),  # noqa: B008
    vision: VisionOptions = VisionOptions(),  # noqa: B008
    engine: EngineOptions = EngineOptions(),  # noqa: B008
) -> None:
    """Summarise documents, with page citations such as [p. 3].

    Reads PDF, PNG, JPEG, WebP, TIFF, GIF, BMP, AVIF, HEIC and plain text; scanned pages by OCR. Of a folder, the files
    whose names end like one of these are taken, and hidden ones are not; patterns are matched with the name and with
    the path below the folder, where * also stands for /.

    Each summary goes to standard output as soon as it is done, and with -o also into a file: report.pdf becomes
    report.pdf.md, below the same subfolders. Names count from the folder given; of several files or folders, from the
    folder they have in common, so that equal names never meet.

    A result that exists is never written over unasked: --resume keeps those made from the same content with the same
    options and does the others, --force does all again. Documents with equal content are done once. What fails is
    reported, and the rest goes on.

    \b
    Examples:
      mmserve summarize report.pdf
      mmserve summarize report.pdf --pages 1-4,7,10- --length short -f json
      mmserve summarize scans/ -r -o summaries/ --report errors.jsonl
      mmserve summarize scans/ -r -o summaries/ --resume
      mmserve summarize archive/ -r --include '*.pdf' --exclude drafts --dry-run
      curl -s https://example.com/report.pdf | mmserve summarize -

    Exit codes: 0 all done, 1 some failed, 2 wrong usage, 3 model or dependency missing, 130 interrupted.
    """
    options = summary.to_options(documents.max_pages)
    task = Task("summarize", repr(options), _starter(options))
    run_task(paths, task, files, TaskOptions(engine, documents, vision))


def _starter(
    options: "SummarizeOptions",
) -> "Callable[[EngineClient, PageReader, PromptBuilder, Callable[[str], None]], Worker]":
    def start(
        engine: "EngineClient", reader: "PageReader", prompts: "PromptBuilder", tell: Callable[[str], None]
    ) -> Worker:
        from mmserve.pipelines.summarize import Summary, summarize

        async def work(source: Source) -> Summary:
            def on_event(event: Event) -> None:
                step = describe(event)
                if step is not None:
                    tell(f"{source.path.name[:MAX_NAME_SHOWN]}: {step}")

            return await summarize(
                source.path,
                name=source.label,
                engine=engine,
                prompts=prompts,
                reader=reader,
                options=options,
                on_event=on_event,
            )

        return work

    return start


def describe(event: Event) -> str | None:
    """What is being done, for the progress bar."""
    if isinstance(event, PageRead):
        return f"page {event.num_read} of {event.num_pages}"
    return "summarising" if isinstance(event, RequestSubmitted) else None
