"""`mmserve transcribe`: documents in, Markdown out, page by page."""

import typer

from mmserve.commands.documents import BatchCommandOptions, DocumentPaths, ModelOptions, run_task
from mmserve.commands.options import DocumentOptions, EngineOptions, VisionOptions, with_option_groups
from mmserve.commands.tasks import ReadingOptions, document_task, options_for

app = typer.Typer()


@app.command()
@with_option_groups
def transcribe(
    paths: DocumentPaths,
    reading: ReadingOptions = ReadingOptions(),  # noqa: B008
    files: BatchCommandOptions = BatchCommandOptions(),  # noqa: B008
    documents: DocumentOptions = DocumentOptions(),  # noqa: B008
    vision: VisionOptions = VisionOptions(),  # noqa: B008
    engine: EngineOptions = EngineOptions(),  # noqa: B008
) -> None:
    """Write documents down as Markdown, page by page, with their headings, paragraphs, lists and tables.

    Pages with a text layer that can be trusted, and pages that OCR reads, are laid out from where their text stands;
    no model is asked. A vision-language model reads the pages that have no text, or with --mode vision all of them.
    Each page stands under a mark such as <!-- page 3 -->; one that is blank or could not be read says so.

    Files, folders, results and exit codes are as for mmserve summarize (see its --help).

    \b
    Examples:
      mmserve transcribe report.pdf
      mmserve transcribe scans/ -r -o markdown/ --resume
      mmserve transcribe form.png --model Qwen/Qwen2.5-VL-3B-Instruct --mode vision
      mmserve transcribe report.pdf -f json --pages 2-3
    """
    options = options_for("transcribe", reading, documents.max_pages)
    run_task(
        paths, document_task("transcribe", options, "transcribing"), files, ModelOptions(engine, documents, vision)
    )
