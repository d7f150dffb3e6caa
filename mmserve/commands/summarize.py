"""`mmserve summarize`: documents in, summaries with page citations out."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmserve.commands.documents import BatchCommandOptions
from mmserve.commands.options import DocumentOptions, EngineOptions, with_option_groups

if TYPE_CHECKING:
    pass

app = typer.Typer()


@app.command()
@with_option_groups
def summarize(
    paths: Annotated[
        list[Path], typer.Argument(metavar="FILE|DIR|-...", help="Documents, folders of them, or - for standard input.")
    ],
    files: BatchCommandOptions,
    engine: EngineOptions,
    documents: DocumentOptions,
) -> None:
    """Summarise documents."""
