"""Tiny checkpoints to quantize, and the logits of what comes out, by transformers and by the engine's own runner."""

from pathlib import Path
from typing import Any

import torch
from reference_models import VOCAB_SIZE

from mmserve.cache.encoder_cache import EncoderCache
from mmserve.config import CacheConfig, EngineConfig, SchedulerConfig
from mmserve.engine.model_runner import ModelRunner
from mmserve.quantizer.run import ModelQuantizer
from mmserve.quantizer.settings import QuantizeSettings
from mmserve.weights.checkpoint import open_checkpoint

SEQ_LEN = 24


def calibration_ids(num_samples: int = 8, seed: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (num_samples, SEQ_LEN), generator=generator)


def quantizer(
    folder: Path, out: Path, scheme: str, *, samples: Any = None, device: str = "cpu", **settings: Any
) -> ModelQuantizer:
    """In float32; a GGUF file's tokenizer is written, a folder's files are copied."""
    chosen = QuantizeSettings(scheme=scheme, **{"group_size": 32, **settings})  # type: ignore[arg-type]
    return ModelQuantizer(
        open_checkpoint(str(folder)),
        chosen,
        calibration_ids() if samples is None and chosen.needs_texts else samples,
        out,
        source=folder if folder.is_dir() else None,
        dtype=torch.float32,
        device=torch.device(device),
    )


def our_runner(folder: Path) -> ModelRunner:
    config = EngineConfig(
        model=str(folder),
        dtype="float32",
        device="cpu",
        num_threads=1,
        cache=CacheConfig(memory_bytes=1 << 22),
        scheduler=SchedulerConfig(max_num_seqs=1),
    )
    return ModelRunner(config, open_checkpoint(str(folder)), EncoderCache(64))


def our_logprobs(folder: Path, ids: list[int]) -> torch.Tensor:
    """Of every token but the first."""
    return our_runner(folder).prompt_logprobs(ids, 1)


def their_logprobs(folder: Path, ids: list[int], auto_class: str = "AutoModelForCausalLM") -> torch.Tensor:
    import transformers

    config = transformers.AutoConfig.from_pretrained(str(folder))
    weights = config.quantization_config["config_groups"]["group_0"]["weights"]
    # Otherwise transformers 5.24 takes packed weights only where they have no zero points.
    inputs = config.quantization_config["config_groups"]["group_0"]["input_activations"]
    config.quantization_config["dequantize"] = not weights["symmetric"] or inputs is None
    model = getattr(transformers, auto_class).from_pretrained(
        str(folder), config=config, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        logits = model.eval()(torch.tensor([ids])).logits[0].float()
    logprobs: torch.Tensor = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return logprobs
