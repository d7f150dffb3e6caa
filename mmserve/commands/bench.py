"""`mmserve bench`: how fast the engine is on this machine, as one JSON object."""

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from mmserve.bench.workloads import WORKLOADS, build_workload
from mmserve.commands.options import EngineOptions, with_option_groups
from mmserve.errors import RequestError

app = typer.Typer(no_args_is_help=True)
WORKLOAD_HELP = "; ".join(f"{name}: {kind.summary}" for name, kind in WORKLOADS.items())


@app.callback()
def bench() -> None:
    """Measure the engine's speed on this machine."""


@app.command()
@with_option_groups
def throughput(
    workload: Annotated[str, typer.Option("--workload", "-w", help=f"What is run. {WORKLOAD_HELP}.")] = "C1",
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Number of prompts, if not the workload's own.", show_default=False)
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the figures are those of the median one.")] = 1,
    baseline: Annotated[
        Literal["transformers"] | None, typer.Option(help="Also run this, round by round in turn with mmserve.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the JSON to this file as well.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on the terminal.")] = False,
    engine: EngineOptions = EngineOptions(),  # noqa: B008
) -> None:
    """Offer many requests at once; print speed, latencies and memory.

    Every prompt has random ids from a fixed seed; answers are greedy and of a fixed length. Latencies are in
    milliseconds: ttft to the first token, tpot between later ones. Memory is the most seen over all processes of
    mmserve. With --baseline, the ratio of the output tokens per second of both is printed too: on a machine that others
    use as well, only rounds side by side can be compared.

    \b
    Examples:
      mmserve bench throughput --workload C1 --num-threads 2
      mmserve bench throughput --workload C1 --num-threads 2 --baseline transformers --rounds 3
    """
    if output is not None and not output.parent.is_dir():
        raise RequestError("invalid_request", f"the folder of {output} does not exist", param="output")
    config, work = engine.to_config(), build_workload(workload, num_prompts)
    from mmserve.bench.throughput import run_throughput

    console = Console(stderr=True, quiet=quiet or not sys.stderr.isatty())
    with console.status("Starting") as status:
        report = run_throughput(config, work, rounds=rounds, baseline=baseline, on_progress=status.update)
    text = json.dumps(report)
    typer.echo(text)
    if output is not None:
        output.write_text(text + "\n", encoding="utf-8")
