"""`mmserve quantize`: a model in fewer bits, calibrated on one's own documents."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from mmserve.commands.documents import ending_like_interrupted
from mmserve.commands.options import DocumentOptions, with_option_groups
from mmserve.commands.paths import named_path
from mmserve.commands.progress import printable
from mmserve.commands.texts import load_texts
from mmserve.errors import RequestError
from mmserve.quantizer.settings import OutputDType, QuantizeSettings, SchemeName, output_dtype
from mmserve.weights import hub

if TYPE_CHECKING:
    import torch

    from mmserve.weights.checkpoint import Checkpoint

app = typer.Typer()
EXIT_INTERRUPTED = 130

_OutputOption = Annotated[
    Path, typer.Option("--output", "-o", metavar="DIR", parser=named_path, help="New folder for the result.")
]
_CalibrationOption = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE|DIR", parser=named_path, help="Documents or texts like those to be read later; repeatable."
    ),
]
_KeepOption = Annotated[
    float,
    typer.Option(
        help="fp8, int8 with texts: the share of weights that may stay as it is: those whose rounding harms most."
    ),
]


@app.command()
@with_option_groups
def quantize(
    model: Annotated[str, typer.Argument(help="A built-in name, a local folder, a .gguf file, or a hub id.")],
    output: _OutputOption,
    scheme: Annotated[
        SchemeName,
        typer.Option(help="gptq, awq and rtn (plain rounding): int4 weights; fp8, int8: weights and activations."),
    ] = "gptq",
    calibration: _CalibrationOption = None,
    samples: Annotated[int, typer.Option(help="Pieces of the calibration texts that are used.")] = 512,
    seq_len: Annotated[int, typer.Option(help="Tokens of a piece.")] = 512,
    group_size: Annotated[int, typer.Option(help="int4: weights of a row that share a scale: 32, 64 or 128.")] = 64,
    symmetric: Annotated[bool, typer.Option("--symmetric", help="int4: without zero points.")] = False,
    act_order: Annotated[bool, typer.Option(help="gptq, fp8, int8: columns with the largest inputs first.")] = True,
    damping: Annotated[float, typer.Option(help="gptq, fp8, int8: on the diagonal, a share of its mean.")] = 0.01,
    keep: _KeepOption = 0.125,
    dtype: Annotated[
        OutputDType, typer.Option(help="Of scales and of what is not quantized: auto is float16 if the model is.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of the choice of pieces.")] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but the result.")] = False,
    documents: DocumentOptions = DocumentOptions(),  # noqa: B008
) -> None:
    """Quantize a model, and write it as a compressed-tensors checkpoint that mmserve, transformers and vLLM load.

    gptq and awq see what the model does with the calibration texts, which are read as documents are everywhere else;
    fp8 and int8 can do with or without; rtn takes none. One layer is in memory at a time, and an interrupted run goes
    on where it was when it is given again. Embeddings, output layer, and all of a vision-language model but its decoder
    stay as they are; with fp8, int8 and texts, the few matrices whose rounding harms most do, too.

    \b
    Examples:
      mmserve quantize ./Qwen3-4B --calibration invoices/ -o Qwen3-4B-int4
      mmserve quantize ./Qwen3-4B --scheme fp8 -o Qwen3-4B-fp8
    """
    settings = QuantizeSettings(
        scheme=scheme,
        group_size=group_size,
        symmetric=symmetric,
        act_order=act_order,
        damping=damping,
        keep=keep,
        num_samples=samples,
        seq_len=seq_len,
        seed=seed,
    )
    _check_calibration(settings, calibration)
    _check_output(output)
    console = Console(stderr=True, quiet=quiet, markup=False, highlight=False, soft_wrap=True)
    with ending_like_interrupted(), console.status("Reading texts") as status:
        note = _printing(console)
        texts = load_texts(calibration, documents, status.update, note) if calibration else []
        job = _Job(model, output, settings, dtype, device)
        try:
            answer = job.run(texts, status.update, note)
        except KeyboardInterrupt:
            console.print("Interrupted. The layers that are done are kept: give the same command to go on.")
            raise typer.Exit(EXIT_INTERRUPTED) from None
    typer.echo(json.dumps(answer, indent=2))


def _printing(console: Console) -> Callable[[str], None]:
    return lambda text: console.print(printable(text))


def _check_output(output: Path) -> None:
    from mmserve.quantizer.partial import require_new

    # Before texts are read, which may take long.
    require_new(output)


def _check_calibration(settings: QuantizeSettings, calibration: list[Path] | None) -> None:
    message = None
    if settings.needs_texts and not calibration:
        message = f"--scheme {settings.scheme} needs texts: give --calibration DIR|FILE"
    elif not settings.takes_texts and calibration:
        message = f"--scheme {settings.scheme} looks at weights alone: leave --calibration out"
    if message is not None:
        raise RequestError("invalid_request", message, param="calibration")


@dataclass(frozen=True)
class _Job:
    model: str
    output: Path
    settings: QuantizeSettings
    dtype: OutputDType
    device: str

    def run(self, texts: list[str], tell: Callable[[str], None], note: Callable[[str], None]) -> dict[str, Any]:
        from mmserve.engine.model_runner import choose_device
        from mmserve.quantizer.run import ModelQuantizer
        from mmserve.weights.checkpoint import open_checkpoint

        path = hub.resolve(self.model)
        checkpoint = open_checkpoint(os.fspath(path))
        stored = str(checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype"))
        result = ModelQuantizer(
            checkpoint,
            self.settings,
            _samples(texts, checkpoint, self.settings, note) if texts else None,
            self.output,
            source=path if path.is_dir() else None,
            dtype=output_dtype(self.dtype, stored),
            device=choose_device(self.device),
        ).run(lambda done, num_layers: tell(f"Quantizing: {done} of {num_layers} layers done"))
        return {
            "object": "quantized_model",
            "path": os.fspath(result.path),
            "scheme": self.settings.scheme,
            "num_layers": result.num_layers,
            "num_layers_resumed": result.num_layers_resumed,
            "num_samples": result.num_samples,
            "num_bytes": result.num_bytes,
        }


def _samples(
    texts: list[str], checkpoint: "Checkpoint", settings: QuantizeSettings, note: Callable[[str], None]
) -> "torch.Tensor":
    from mmserve.quantizer.texts import samples_of

    samples = samples_of(
        texts,
        checkpoint.tokenizer(),
        num_samples=settings.num_samples,
        seq_len=settings.seq_len,
        seed=settings.seed,
    )
    if len(samples) < settings.num_samples:
        note(f"The texts are enough for {len(samples)} of {settings.num_samples} samples.")
    return samples
