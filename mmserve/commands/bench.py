"""`mmserve bench`: how fast the engine is on this machine, as one JSON object."""

import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from mmserve.bench.workloads import WORKLOADS, PageForm, build_workload
from mmserve.commands.options import EngineOptions, VisionOptions, with_option_groups
from mmserve.config import EngineConfig
from mmserve.errors import RequestError
from mmserve.vision.page_types import PageLimits

if TYPE_CHECKING:
    from mmserve.bench.limits import Ceilings

app = typer.Typer(no_args_is_help=True)
CeilingsOption = Annotated[
    str | None,
    typer.Option(
        metavar="OPERATIONS,BYTES",
        help="What the device does in a second at best, such as 789e12,4.27e12; measured on a GPU if not given.",
    ),
]
OutputOption = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the JSON to this file as well.")
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on the terminal.")]
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
    ceilings: CeilingsOption = None,
    output: OutputOption = None,
    quiet: QuietOption = False,
    engine: EngineOptions = EngineOptions(),  # noqa: B008
) -> None:
    """Offer many requests at once; print speed, latencies and memory.

    Every prompt has random ids from a fixed seed; answers are greedy and of a fixed length. Latencies are in
    milliseconds: ttft to the first token, tpot between later ones. Where prompts come one after the other,
    first_request_ttft_ms is that of a request of the same length right after the start, which counts in no other
    figure. Memory is the most seen over all processes of mmserve. With --baseline, the ratio of the output tokens per
    second of both is printed too: on a machine that others use as well, only rounds side by side can be compared.
    limit_seconds is what the device needs at least, computed from operations and bytes at its ceilings.

    \b
    Examples:
      mmserve bench throughput --workload C1 --num-threads 2
      mmserve bench throughput --workload C1 --num-threads 2 --baseline transformers --rounds 3
      mmserve bench throughput --workload T1 --model shape:llama-2-7b --load-format dummy --max-num-seqs 256
    """
    _check_output(output)
    config, work = engine.to_config(), build_workload(workload, num_prompts)
    chosen = _read_ceilings(ceilings)
    from mmserve.bench.throughput import run_throughput

    with _progress(quiet) as on_progress:
        report = run_throughput(
            config, work, rounds=rounds, baseline=baseline, ceilings=chosen, on_progress=on_progress
        )
    _write(report, output)


@app.command()
def serve(
    url: Annotated[str, typer.Option(help="Where the server listens.")] = "http://127.0.0.1:8000",
    workload: Annotated[str, typer.Option("--workload", "-w", help=f"What is sent. {WORKLOAD_HELP}.")] = "C1",
    request_rate: Annotated[
        float | None,
        typer.Option(
            metavar="RATE", help="Requests a second, at random moments from a fixed seed.", show_default=False
        ),
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests at a time, if not the workload's own.", show_default=False)
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Number of prompts, if not the workload's own.", show_default=False)
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Name of the model, if not the first that is served.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds without a word from the server that end a request.")] = 600.0,
    output: OutputOption = None,
    quiet: QuietOption = False,
) -> None:
    """Send a workload to a running server, streamed; print speed, latencies and failures.

    Latencies are in milliseconds: ttft to the first text, tpot between later tokens, e2e to the last. Requests that
    failed are counted by the server's code and are in no other figure. The same prompts as `bench throughput` are sent,
    so restart the server, or its cache knows them.

    \b
    Examples:
      mmserve bench serve --workload T1 --request-rate 20
      mmserve bench serve --url http://127.0.0.1:9000 --workload C1 --concurrency 4 --num-prompts 32
    """
    _check_output(output)
    work = build_workload(workload, num_prompts)
    from mmserve.bench.serve import Pace, run_serve

    pace = Pace(request_rate, concurrency)
    with _progress(quiet) as on_progress:
        report = run_serve(url, work, pace, model=model, timeout=timeout, on_progress=on_progress)
    _write(report, output)


@app.command()
@with_option_groups
def vision(
    workload: Annotated[
        Literal["D1", "D2", "encoder", "memory"],
        typer.Option(
            "--workload",
            "-w",
            help="What is run. D1: 96 pages, a question each, 128 tokens out; D2: 16 pages, four questions each, 64"
            " tokens out; encoder: ours against transformers' on 4 pages (Qwen-VL models);"
            " memory: 2000 small pictures, a quarter of them twice.",
        ),
    ] = "D1",
    num_pages: Annotated[
        int | None, typer.Option(min=1, help="Number of pages, if not the workload's own.", show_default=False)
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Length of answers in D1 and D2, if not theirs.", show_default=False)
    ] = None,
    source: Annotated[
        PageForm,
        typer.Option(help="How D1 and D2 offer pages: as decoded pictures, as PNG files, or as one PDF of pictures."),
    ] = "pixels",
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Pages that are asked about alone in D1 and D2, 3 if not given; rounds of encoder, 1.",
            show_default=False,
        ),
    ] = None,
    ceilings: CeilingsOption = None,
    output: OutputOption = None,
    quiet: QuietOption = False,
    pictures: VisionOptions = VisionOptions(),  # noqa: B008
    engine: EngineOptions = EngineOptions(),  # noqa: B008
) -> None:
    """Offer pages to a vision-language model; print speed, latencies and memory.

    Pages of A4 at 150 dpi with random words, from fixed seeds; answers are greedy and of a fixed length. The clock
    starts before a page is read or hashed. Before D1 and D2, two questions about each of --rounds further pages are
    asked, one after the other: page_alone says how soon a page is answered that is the only one, and same_page how
    much sooner when it is known. Seconds of preprocessing, which are those outside the engine, and of the encoder are
    sums over pages. limit_seconds is what the device needs at least, for Qwen's towers.

    \b
    Examples:
      mmserve bench vision --model ORG/NAME --load-format dummy --workload D1 --num-pages 2 --max-tokens 8
      mmserve bench vision --model shape:qwen2.5-vl-7b --load-format dummy --workload D1 --max-pixels 12845056
      mmserve bench vision --model FOLDER --workload encoder --rounds 3 --num-threads 2
      mmserve bench vision --model FOLDER --workload memory --kv-cache-memory-bytes 4MiB
    """
    _check_output(output)
    config, chosen = engine.to_config(), _read_ceilings(ceilings)
    with _progress(quiet) as on_progress:
        report = _run_vision(config, pictures, workload, source, num_pages, max_tokens, rounds, chosen, on_progress)
    _write(report, output)


def _run_vision(
    config: EngineConfig,
    pictures: VisionOptions,
    workload: str,
    source: PageForm,
    num_pages: int | None,
    max_tokens: int | None,
    rounds: int | None,
    ceilings: "Ceilings | None",
    on_progress: Callable[[str], None],
) -> dict[str, Any]:
    limits = pictures.to_limits()
    if workload == "encoder":
        from mmserve.bench.encoder import run_encoder

        return run_encoder(config, num_pages=num_pages or 4, rounds=rounds or 1, limits=limits, on_progress=on_progress)
    if workload == "memory":
        from mmserve.bench.image_memory import run_image_memory

        return run_image_memory(
            config,
            num_pictures=num_pages or 2000,
            num_workers=pictures.num_preprocess_workers,
            limits=limits,
            on_progress=on_progress,
        )
    from mmserve.bench.vision import build_page_workload, run_vision

    pages = build_page_workload(workload, num_pages, max_tokens)
    open_prompts = functools.partial(pictures.open_prompts, pages=PageLimits())
    return run_vision(
        config, pages, open_prompts, form=source, rounds=rounds or 3, ceilings=ceilings, on_progress=on_progress
    )


def _read_ceilings(text: str | None) -> "Ceilings | None":
    if text is None:
        return None
    from mmserve.bench.limits import parse_ceilings

    try:
        return parse_ceilings(text)
    except ValueError:
        raise RequestError(
            "invalid_request", f"--ceilings {text!r} is not like 789e12,4.27e12", param="ceilings"
        ) from None


def _check_output(output: Path | None) -> None:
    if output is not None and not output.parent.is_dir():
        raise RequestError("invalid_request", f"the folder of {output} does not exist", param="output")


@contextlib.contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    console = Console(stderr=True, quiet=quiet or not sys.stderr.isatty())
    with console.status("Starting") as status:
        yield status.update


def _write(report: Mapping[str, Any], output: Path | None) -> None:
    text = json.dumps(report)
    typer.echo(text)
    if output is not None:
        output.write_text(text + "\n", encoding="utf-8")
