"""`mmserve extract`: documents and a schema in, JSON out, each value with its page."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mmserve.commands.documents import BatchCommandOptions, DocumentPaths, ModelOptions, run_task
from mmserve.commands.options import DocumentOptions, EngineOptions, VisionOptions, with_option_groups
from mmserve.commands.outputs import OutputFormat
from mmserve.commands.tasks import ReadingOptions, document_task, options_for
from mmserve.errors import RequestError

app = typer.Typer()


@dataclass(frozen=True, kw_only=True)
class ExtractionFiles(BatchCommandOptions):
    """JSON is what most go on with."""

    format: Annotated[
        OutputFormat,
        typer.Option("--format", "-f", help="How results look.", rich_help_panel="Results"),
    ] = "json"


@app.command()
@with_option_groups
def extract(
    paths: DocumentPaths,
    schema: Annotated[
        str | None, typer.Option(metavar="FILE|JSON", help="JSON Schema of an object, as a file or as it is.")
    ] = None,
    fields: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Instead of a schema: names of values, vendor,date,total.")
    ] = None,
    reading: ReadingOptions = ReadingOptions(),  # noqa: B008
    files: ExtractionFiles = ExtractionFiles(),
    documents: DocumentOptions = DocumentOptions(),  # noqa: B008
    vision: VisionOptions = VisionOptions(),  # noqa: B008
    engine: EngineOptions = EngineOptions(),  # noqa: B008
) -> None:
    """Extract values from documents as JSON that fits a schema; "values" says on which page each was read.

    A value that no page has becomes null where the schema allows it; where it does not, it is kept and marked
    "verified": false. Null means that the document does not say. --fields makes a schema of strings that may be null.

    Files, folders, results and --resume work as in mmserve summarize.

    \b
    Examples:
      mmserve extract invoice.pdf --fields vendor,date,total
      mmserve extract invoices/ -r --schema invoice.schema.json -f jsonl
      mmserve extract scan.png --schema '{"type": "object", "properties": {"total": {"type": ["number", "null"]}}}'

    Exit codes: 0 all done, 1 some failed, 2 wrong usage, 3 model or dependency missing, 130 interrupted.
    """
    text = None if schema is None else _schema_text(schema)
    options = options_for("extract", reading, documents.max_pages, schema=text, fields=fields)
    run_task(paths, document_task("extract", options, "extracting"), files, ModelOptions(engine, documents, vision))


def _schema_text(given: str) -> str:
    """What is no JSON object is a file's name."""
    if given.lstrip().startswith("{"):
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        message = f"--schema {given!r} is neither a JSON object nor a file that can be read: {reason}"
        raise RequestError("invalid_request", message, param="schema") from None
