"""`mmserve eval`: how good a model is, as one JSON object."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from mmserve.commands.options import DocumentOptions, with_option_groups
from mmserve.commands.paths import named_path
from mmserve.commands.progress import printable
from mmserve.commands.texts import load_texts
from mmserve.config import DTypeName, EngineConfig, QuantizationName
from mmserve.errors import RequestError

if TYPE_CHECKING:
    from mmserve.weights.checkpoint import Checkpoint

app = typer.Typer(no_args_is_help=True)
USUAL_WINDOW = 2048


@app.callback()
def evaluate() -> None:
    """Measure how good a model is."""


@app.command()
@with_option_groups
def perplexity(
    model: Annotated[str, typer.Argument(help="A built-in name, a local folder, a .gguf file, or a hub id.")],
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE|DIR...", parser=named_path, help="Documents or texts, or folders of them."),
    ],
    window: Annotated[
        int | None, typer.Option(min=2, help="Tokens seen at once: 2048, or the model's context, if not given.")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(min=1, help="Tokens predicted in each window after the first; half if not given.")
    ] = None,
    quantization: Annotated[
        QuantizationName, typer.Option(help="As for mmserve serve: fp8 quantizes a model in full precision.")
    ] = "auto",
    dtype: Annotated[DTypeName, typer.Option(help="Number format of the weights and activations.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    num_threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.", show_default=False)] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on the terminal.")] = False,
    documents: DocumentOptions = DocumentOptions(),  # noqa: B008
) -> None:
    """Print how well a model predicts texts: what quantizing it has cost shows in the difference.

    Texts are read as documents are everywhere else: pages of PDFs and pictures by their text layer or OCR. Each token
    is predicted once, from those before it in its window. perplexity is per token, and can be compared between models
    with the same tokenizer; bits_per_byte can be compared between all. model_bytes is the memory of the weights as
    they are held.

    \b
    Examples:
      mmserve eval perplexity smollm2-135m report.pdf
      mmserve eval perplexity ./smollm2-int4 texts/ --dtype float32
    """
    console = Console(stderr=True, quiet=quiet, markup=False, highlight=False, soft_wrap=True)
    with console.status("Reading texts") as status:
        texts = load_texts(files, documents, status.update, lambda text: console.print(printable(text)))
        status.update(f"Loading {model}")
        config = EngineConfig(
            model=model, quantization=quantization, dtype=dtype, device=device, num_threads=num_threads
        )
        answer = _measured(config, texts, window, stride, lambda: status.update("Measuring"))
    typer.echo(json.dumps(answer, indent=2))


def _measured(
    config: EngineConfig, texts: list[str], window: int | None, stride: int | None, on_loaded: Callable[[], None]
) -> dict[str, Any]:
    from mmserve.quantizer.perplexity import measure, open_runner
    from mmserve.weights.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(config.model)
    size = _window(window, checkpoint)
    step = max(size // 2, 1) if stride is None else stride
    runner = open_runner(config, checkpoint, window=size)
    on_loaded()
    result = measure(texts, checkpoint.tokenizer(), runner, size=size, stride=step)
    return {
        "object": "perplexity",
        "model": config.model,
        "num_texts": len(texts),
        "window": size,
        "stride": step,
        "dtype": str(runner.dtype).removeprefix("torch."),
        "device": str(runner.device),
        "model_bytes": runner.num_weight_bytes,
        **result.to_dict(),
    }


def _window(asked: int | None, checkpoint: "Checkpoint") -> int:
    from mmserve.config import ModelConfig

    context = ModelConfig.from_hf(checkpoint.config, checkpoint.generation_config).max_context
    if asked is not None and asked > context:
        raise RequestError(
            "invalid_request", f"--window {asked} exceeds the model's context of {context} tokens", param="window"
        )
    return asked or min(USUAL_WINDOW, context)
