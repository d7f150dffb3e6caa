"""Our vision encoder against transformers': the same weights, precision, threads and batch of pages, in turn."""

import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mmserve.bench.pages import A4_SIZE, draw_page
from mmserve.bench.report import Report, versions
from mmserve.config import EngineConfig, ModelConfig
from mmserve.engine.model_runner import choose_device, choose_dtype
from mmserve.errors import RequestError
from mmserve.vision.image_plan import ImageProcessor
from mmserve.vision.image_source import PixelLimits
from mmserve.vision.patches import PixelPatches
from mmserve.vision.preprocess import load_processor
from mmserve.vision.qwen_vit import QwenVit, QwenVitConfig
from mmserve.weights.checkpoint import Checkpoint, open_checkpoint
from mmserve.weights.layer_loader import LayerLoader
from mmserve.weights.loader import WeightReader

Encode = Callable[[Sequence[PixelPatches]], list[torch.Tensor]]

# By `model_type`: the module of transformers and its encoder.
_REFERENCES = {
    "qwen2_vl": ("qwen2_vl.modeling_qwen2_vl", "Qwen2VisionTransformerPretrainedModel"),
    "qwen2_5_vl": ("qwen2_5_vl.modeling_qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel"),
    "qwen3_vl": ("qwen3_vl.modeling_qwen3_vl", "Qwen3VLVisionModel"),
}


def run_encoder(
    config: EngineConfig,
    *,
    num_pages: int = 4,
    rounds: int = 1,
    limits: PixelLimits | None = None,
    page_size: tuple[int, int] = A4_SIZE,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Median seconds of both over `rounds`, their ratio (theirs to ours: above 1 we are faster), how far apart the
    tokens are. Preprocessing is not part of it.

    Raises `RequestError` for other models than Qwen-VL's.
    """
    device = choose_device(config.device)
    checkpoint = open_checkpoint(config.model, load_format=config.load_format, seed=config.seed, device=device)
    model = ModelConfig.from_hf(checkpoint.config, checkpoint.generation_config)
    model_type = str(checkpoint.config.get("model_type"))
    processor = load_processor(checkpoint, checkpoint.tokenizer()) if model_type in _REFERENCES else None
    if processor is None:
        known = ", ".join(_REFERENCES)
        raise RequestError("invalid_request", f"encoders of these models can be compared: {known}", param="model")
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    dtype = choose_dtype(config.dtype, model, device)
    on_progress("Preparing")
    pages = [_prepare(processor, number, page_size, limits or PixelLimits(), device) for number in range(num_pages)]
    engines = {
        "mmserve": _ours(checkpoint, model, dtype, device),
        "transformers": _theirs(checkpoint, dtype, device),
    }
    return {
        "workload": "encoder",
        "model": config.names[0],
        "num_pages": num_pages,
        "num_patches": sum(len(page.pixels) for page in pages),
        **_compare(engines, pages, rounds, on_progress),
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "versions": versions(),
    }


def _compare(
    engines: dict[str, Encode], pages: Sequence[PixelPatches], rounds: int, on_progress: Callable[[str], None]
) -> Report:
    with torch.inference_mode():
        on_progress("Warming up")
        for encode in engines.values():
            encode(pages[:1])
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        outputs: dict[str, torch.Tensor] = {}
        for number in range(1, rounds + 1):
            # Who begins takes turns as well.
            for name in sorted(engines, reverse=number % 2 == 0):
                on_progress(f"Round {number} of {rounds}: {name}")
                started = time.perf_counter()
                outputs[name] = torch.cat(engines[name](pages)).float()
                seconds[name].append(time.perf_counter() - started)
    ours, theirs = (seconds[name] for name in ("mmserve", "transformers"))
    difference = (outputs["mmserve"] - outputs["transformers"]).norm() / outputs["transformers"].norm()
    return {
        **{f"{name}_seconds": round(statistics.median(values), 4) for name, values in seconds.items()},
        "ratio": round(statistics.median(their / our for our, their in zip(ours, theirs, strict=True)), 4),
        "rounds": [{name: round(values[index], 4) for name, values in seconds.items()} for index in range(rounds)],
        "relative_difference": float(f"{float(difference):.3g}"),
    }


def _ours(checkpoint: Checkpoint, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> Encode:
    assert model.vision is not None
    loader = LayerLoader(WeightReader(checkpoint), dtype, device)
    encoder = QwenVit(loader, QwenVitConfig.from_hf(checkpoint.config["model_type"], model.vision))

    def encode(pages: Sequence[PixelPatches]) -> list[torch.Tensor]:
        return _finished(encoder(pages), device)

    return encode


def _theirs(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Encode:
    model = _load_reference(checkpoint, dtype).to(device)

    def encode(pages: Sequence[PixelPatches]) -> list[torch.Tensor]:
        pixels = torch.cat([page.pixels for page in pages]).to(dtype)
        grids = torch.tensor([page.layout for page in pages], device=device)
        output = model(pixels, grid_thw=grids, return_dict=True)
        deepstack = getattr(output, "deepstack_features", None) or ()
        return _finished([torch.cat((output.pooler_output, *deepstack), dim=1)], device)

    return encode


def _load_reference(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    """transformers' encoder with the checkpoint's weights."""
    from transformers import AutoConfig

    settings = dict(checkpoint.config)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings).vision_config
    module, name = _REFERENCES[checkpoint.config["model_type"]]
    encoder_class = getattr(importlib.import_module(f"transformers.models.{module}"), name)
    model = encoder_class._from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    reader = WeightReader(checkpoint, dtype=dtype)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.copy_(reader.take(f"vision.{parameter_name}", tuple(parameter.shape)))
    return model


def _finished(tokens: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return tokens


def _prepare(
    processor: ImageProcessor, number: int, size: tuple[int, int], limits: PixelLimits, device: torch.device
) -> PixelPatches:
    image = draw_page(number, size)
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(size[1], size[0], 3)
    (patches,) = processor.process(pixels, processor.plan(*size, limits))
    return PixelPatches(patches.pixels.to(device), patches.layout)
