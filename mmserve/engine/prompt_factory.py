"""The prompt builder that belongs to an engine: its processor, its limits, and where it wants pictures to be cut."""

import torch

from mmserve.config import EngineConfig
from mmserve.engine.client import EngineClient
from mmserve.engine.prompt_builder import PromptBuilder
from mmserve.vision.image_source import PixelLimits
from mmserve.vision.page_types import PageLimits
from mmserve.vision.preprocess_pool import PreprocessPool
from mmserve.vision.preprocess_worker import PixelsOn

DEFAULT_NUM_WORKERS = 2


def open_prompts(
    client: EngineClient,
    *,
    num_workers: int = DEFAULT_NUM_WORKERS,
    limits: PixelLimits | None = None,
    pages: PageLimits | None = None,
    capacity_bytes: int = 0,
) -> PromptBuilder:
    """What turns messages into prompts of the client's model; close it when done.

    `capacity_bytes` bounds the shared memory of pictures, 0 for what the system allows. Raises `RequestError`.
    """
    processor = client.image_processor
    if processor is None:
        return PromptBuilder(client.tokenizer, limits=limits)
    pool = PreprocessPool(
        processor,
        num_workers,
        pages or PageLimits(),
        capacity_bytes,
        client.settle,
        pixels_on=pixels_on(client.config),
        device_type=device_type(client.config.device),
    )
    return PromptBuilder(client.tokenizer, processor, pool, limits=limits)


def pixels_on(config: EngineConfig) -> PixelsOn:
    """A GPU scales and cuts a page in a fraction of a millisecond, a worker in a tenth of a second."""
    if config.vision.pixels_on != "auto":
        return config.vision.pixels_on
    return "device" if device_type(config.device) == "cuda" else "worker"


def device_type(device: str) -> str:
    """`cuda` of `cuda:1`, and what `auto` will be."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device.partition(":")[0]
