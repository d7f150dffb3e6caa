"""Compares the engine with transformers at the real dimensions of vision-language models, with random weights.

    python tests/real_dimensions.py --output DIR [--models qwen2_5_vl,qwen3_vl,llava] [--tiny]

On a GPU in bfloat16, with transformers in float32 as the yardstick of what rounding does; needs no checkpoint and no
network. `--tiny` takes the same way on the CPU in float32 with small layers. Writes real_dimensions.json and a plot of
the error by layer for each model; exits with 1 where the engine is off, or where a fault would go unseen.
"""

import argparse
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from line_plot import line_plot
from published_shapes import PUBLISHED, Published, tiny
from traced_models import (
    Ours,
    Prompt,
    Trace,
    build_reference,
    controls,
    cosine,
    make_page,
    make_prompt,
    prompt_arguments,
    run_reference,
    vision_arguments,
)
from vision_driver import build_prompt, patch_store

from mmserve.vision.image_source import PixelLimits
from mmserve.vision.patches import PixelPatches

MIN_COSINE = 0.999
# A fault is seen if it moves the logits well beyond what rounding does.
MAX_COSINE_OF_A_FAULT = 0.99
WARM_UPS, REPEATS = 3, 10
MIB = 2**20
_PARTS = ("engine", "transformers")


def compare(shape: Published, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Everything about one model. The float32 run comes last: it turns transformers' weights into float32."""
    started = time.perf_counter()
    prompt, page = make_prompt(shape), _on(device, make_page(shape, 3, PixelLimits()).items[0].patches)
    reference = build_reference(shape, dtype, device)
    theirs = run_reference(reference, prompt, prompt.pages)
    result: dict[str, Any] = {
        "model": shape.title,
        "gains": asdict(shape.gains),
        "parameters": sum(parameter.numel() for parameter in reference.parameters()),
        "precision": str(dtype).removeprefix("torch."),
        "prompt_tokens": len(prompt.token_ids),
        "image_tokens": prompt.token_ids.count(prompt.image_token_id),
        "chunk": shape.chunk,
        "cosine_of_a_fault": dict(controls(reference, shape, prompt, theirs)),
    }
    result["transformers"] = _reference_speed(reference, prompt, page, device)
    whole, chunked, result["engine"] = _run_ours(shape, reference, prompt, page, device)
    exact = run_reference(reference.float(), prompt, prompt.pages)
    pairs = {
        "engine, one chunk, against transformers": (whole, theirs),
        f"engine, chunks of {shape.chunk}, against transformers": (chunked, theirs),
        "engine, one chunk, against float32": (whole, exact),
        "transformers against float32": (theirs, exact),
    }
    result["cosine"] = {name: cosine(a.logits, b.logits) for name, (a, b) in pairs.items()}
    result["same_token"] = {name: bool(a.logits.argmax() == b.logits.argmax()) for name, (a, b) in pairs.items()}
    result["error_by_layer"] = {name: error_by_layer(a, b) for name, (a, b) in pairs.items()}
    result["passed"] = _passed(result)
    result["seconds"] = time.perf_counter() - started
    return result


def _on(device: torch.device, page: PixelPatches) -> PixelPatches:
    return PixelPatches(page.pixels.to(device), page.layout)


def _run_ours(
    shape: Published, reference: Any, prompt: Prompt, page: PixelPatches, device: torch.device
) -> tuple[Trace, Trace, dict[str, Any]]:
    """The prompt in one chunk and in several, and the speed."""
    num_tokens = len(prompt.token_ids)
    ours = Ours(shape, reference, num_tokens)
    with patch_store() as store:
        image_prompt = build_prompt(prompt.pieces, shape.image_token_id, store)
        whole, chunked = ours.run(image_prompt, num_tokens), ours.run(image_prompt, shape.chunk)
        speed = {
            "vision tower, one page": milliseconds(lambda: ours.encode(page), device),
            "prompt with two pages": milliseconds(lambda: ours.prefill(image_prompt, num_tokens), device),
        }
    return whole, chunked, speed


@torch.inference_mode()
def _reference_speed(reference: Any, prompt: Prompt, page: PixelPatches, device: torch.device) -> dict[str, Any]:
    one_page, whole = vision_arguments([page], device), prompt_arguments(reference, prompt, prompt.pages)
    return {
        "vision tower, one page": milliseconds(lambda: reference.model.get_image_features(**one_page), device),
        "prompt with two pages": milliseconds(lambda: reference(**whole), device),
    }


def _passed(result: Mapping[str, Any]) -> bool:
    ours = [value for name, value in result["cosine"].items() if name.endswith("against transformers")]
    return min(ours) > MIN_COSINE and all(
        value < MAX_COSINE_OF_A_FAULT for value in result["cosine_of_a_fault"].values()
    )


def error_by_layer(trace: Trace, right: Trace) -> list[float]:
    """Relative error over all tokens: first of what entered the decoder, then of what left each layer."""
    pairs = zip(trace.states, right.states, strict=True)
    return [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs]


def milliseconds(call: Callable[[], object], device: torch.device) -> dict[str, float | None]:
    """Median and shortest of several runs, and the most memory that one takes beside what is there before."""
    is_cuda = device.type == "cuda"
    for _ in range(WARM_UPS):
        call()
    before = _reset_peak() if is_cuda else 0
    times = [_cuda_milliseconds(call) if is_cuda else _cpu_milliseconds(call) for _ in range(REPEATS)]
    peak = (torch.cuda.max_memory_allocated() - before) / MIB if is_cuda else None
    return {"median_ms": statistics.median(times), "shortest_ms": min(times), "peak_mib": peak}


def _reset_peak() -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _cuda_milliseconds(call: Callable[[], object]) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    start.record()
    call()
    stop.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(stop))


def _cpu_milliseconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1000


def write(folder: Path, results: Mapping[str, Mapping[str, Any]], device: torch.device) -> None:
    """All that is known so far: the file is whole after each model."""
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    report = {"device": machine, **versions, "models": results}
    (folder / "real_dimensions.json").write_text(json.dumps(report, indent=2) + "\n")
    for family, result in results.items():
        lines = {name: [max(value, 1e-9) for value in values] for name, values in result["error_by_layer"].items()}
        title = f"{result['model']}, {result['precision']}, random weights"
        plot = line_plot(title, "decoder layer (0: what enters the first)", "relative error", lines)
        (folder / f"real_dimensions_{family}.svg").write_text(plot)


def summary(result: Mapping[str, Any]) -> str:
    lines = [f"{result['model']}: {'passed' if result['passed'] else 'FAILED'} in {result['seconds']:.0f} s"]
    lines += [f"  {value:.6f}  {name}" for name, value in result["cosine"].items()]
    lines += [f"  {value:.6f}  {name}" for name, value in result["cosine_of_a_fault"].items()]
    lines += [f"  {part} {what}: {speed}" for part in _PARTS for what, speed in result[part].items()]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--models", default=",".join(PUBLISHED))
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    device, dtype = (torch.device("cpu"), torch.float32) if arguments.tiny else (torch.device("cuda"), torch.bfloat16)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    results: dict[str, dict[str, Any]] = {}
    families = arguments.models.split(",")
    for shape in [PUBLISHED[family] for family in families]:
        try:
            results[shape.family] = compare(tiny(shape) if arguments.tiny else shape, dtype, device)
        except Exception:
            # What was measured of the others is worth keeping.
            traceback.print_exc()
            continue
        print(summary(results[shape.family]), flush=True)
        write(arguments.output, results, device)
        gc.collect()
        torch.cuda.empty_cache()
    return 0 if [result["passed"] for result in results.values()] == [True] * len(families) else 1


if __name__ == "__main__":
    sys.exit(main())
