"""`mmserve ask`: a question and documents in, answers with page citations out."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mmserve.commands.documents import BatchCommandOptions, DocumentPaths, ModelOptions, run_task
from mmserve.commands.options import DocumentOptions, EngineOptions, VisionOptions, with_option_groups
from mmserve.commands.tasks import ReadingOptions, document_task, options_for
from mmserve.errors import RequestError

app = typer.Typer()


@dataclass(frozen=True, kw_only=True)
class AnswerOptions(ReadingOptions):
    """How the answer is given."""

    language: Annotated[
        str | None, typer.Option(help="Language of the answer, such as German; the document's own if not given.")
    ] = None


@app.command()
@with_option_groups
def ask(
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="What to look for, in quotes.")],
    paths: DocumentPaths,
    answer: AnswerOptions = AnswerOptions(),
    files: BatchCommandOptions = BatchCommandOptions(),  # noqa: B008
    documents: DocumentOptions = DocumentOptions(),  # noqa: B008
    vision: VisionOptions = VisionOptions(),  # noqa: B008
    engine: EngineOptions = EngineOptions(),  # noqa: B008
) -> None:
    """Ask documents, each for itself, and get answers with page citations such as [p. 3].

    Every page is considered, however long the document. What no page supports is left out, and a document that does not
    answer says so: in JSON, "found" is false then.

    Files, folders, results and --resume work as in mmserve summarize.

    \b
    Examples:
      mmserve ask "When does the lease end?" lease.pdf
      mmserve ask "What is the total?" receipts/ -r -f jsonl
      mmserve ask "Who signed?" contract.pdf --pages 8- --language German
      curl -s https://example.com/report.pdf | mmserve ask "What was the revenue?" -

    Exit codes: 0 all done, 1 some failed, 2 wrong usage, 3 model or dependency missing, 130 interrupted.
    """
    if Path(question).is_file() and not all(path.exists() or path == Path("-") for path in paths):
        message = f"the question comes first: mmserve ask QUESTION {question}"
        raise RequestError("invalid_request", message, param="question")
    options = options_for("ask", answer, documents.max_pages, question=question)
    run_task(paths, document_task("ask", options, "answering"), files, ModelOptions(engine, documents, vision))
