"""`mmserve summarize`: documents in, summaries with page citations out."""

from dataclasses import dataclass
from typing import Annotated

import typer

from mmserve.commands.documents import BatchCommandOptions, DocumentPaths, ModelOptions, run_task
from mmserve.commands.options import DocumentOptions, EngineOptions, VisionOptions, with_option_groups
from mmserve.commands.tasks import ReadingOptions, document_task, options_for
from mmserve.pipelines.prompts import Length

app = typer.Typer()


@dataclass(frozen=True, kw_only=True)
class SummaryOptions(ReadingOptions):
    """What the summary is about, and how long it is."""

    length: Annotated[Length, typer.Option(help="How much to write; also decides --max-tokens.")] = "medium"
    language: Annotated[
        str | None, typer.Option(help="Language of the summary, such as German; the document's own if not given.")
    ] = None
    prompt: Annotated[str | None, typer.Option(help="What to pay attention to.")] = None


@app.command()
@with_option_groups
def summarize(
    paths: DocumentPaths,
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
    options = options_for("summarize", summary, documents.max_pages)
    run_task(paths, document_task("summarize", options, "summarising"), files, ModelOptions(engine, documents, vision))
