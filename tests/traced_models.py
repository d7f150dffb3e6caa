"""A model of transformers and the engine's over the same weights, and what a prompt becomes in each, layer by layer."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from published_shapes import Published
from random_weights import randomize
from vision_driver import ImagePrompt, Item, Picture, random_picture, random_text

from mmserve.cache.encoder_cache import EncoderCache
from mmserve.cache.kv_cache import KVCache
from mmserve.config import CacheConfig, EngineConfig, ModelConfig
from mmserve.engine.model_runner import ModelRunner
from mmserve.engine.scheduler import ScheduledBatch, advance
from mmserve.request import SamplingParams
from mmserve.request import Sequence as Request
from mmserve.vision.image_source import PixelLimits
from mmserve.vision.patches import PixelPatches
from mmserve.weights.loader import check_shape, missing_weight
from mmserve.weights.names import to_canonical
from mmserve.weights.tokenizer import Tokenizer

BLOCK_SIZE = 16


@dataclass
class Trace:
    """What a prompt became: what entered the first decoder layer and left each, `[T, hidden]`; the last logits."""

    states: list[torch.Tensor]
    logits: torch.Tensor


@dataclass(frozen=True)
class Prompt:
    """Text, a page, text, another page, text."""

    pieces: Sequence[Sequence[int] | Picture]
    image_token_id: int

    @property
    def token_ids(self) -> list[int]:
        return [token for x in self.pieces for token in (x.placeholder_ids if isinstance(x, Picture) else x)]

    @property
    def pages(self) -> list[PixelPatches]:
        return [item.patches for piece in self.pieces if isinstance(piece, Picture) for item in piece.items]


def make_page(shape: Published, seed: int, limits: PixelLimits) -> Picture:
    processor, (width, height) = shape.processor(), shape.page
    plan = processor.plan(width, height, limits)
    patches = processor.process(random_picture(seed, width, height), plan)
    items = [Item(x, item.num_tokens, item.grid) for x, item in zip(patches, plan.items, strict=True)]
    return Picture((*shape.before, *processor.placeholder_ids(plan), *shape.after), items)


def make_prompt(shape: Published) -> Prompt:
    words, limits = range(3, shape.num_words), PixelLimits(max_pixels=shape.prompt_pixels or None)
    texts = [random_text(seed, length, words) for seed, length in enumerate((16, 24, 40))]
    first, second = (make_page(shape, seed, limits) for seed in (1, 2))
    return Prompt((texts[0], first, texts[1], second, texts[2]), shape.image_token_id)


# transformers


def build_reference(shape: Published, dtype: torch.dtype, device: torch.device) -> Any:
    config_class = getattr(transformers, shape.config["architectures"][0].replace("ForConditionalGeneration", "Config"))
    config = config_class.from_dict(copy.deepcopy(dict(shape.config)))
    with device:
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=dtype, attn_implementation="sdpa")
    randomize(model, shape.gains, seed=0)
    return model.eval()


def vision_arguments(pages: Sequence[PixelPatches], device: torch.device) -> dict[str, torch.Tensor]:
    arguments = {"pixel_values": torch.cat([page.pixels for page in pages]).to(device)}
    if pages[0].layout:
        arguments["image_grid_thw"] = torch.tensor([page.layout for page in pages], device=device)
    return arguments


def prompt_arguments(model: Any, prompt: Prompt, pages: Sequence[PixelPatches]) -> dict[str, Any]:
    """With `pages` in the places of the prompt's own."""
    token_ids = torch.tensor([prompt.token_ids], device=model.device)
    arguments: dict[str, Any] = {"input_ids": token_ids, "use_cache": False, "logits_to_keep": 1}
    arguments.update(vision_arguments(pages, model.device))
    if "image_grid_thw" in arguments:
        arguments["mm_token_type_ids"] = (token_ids == prompt.image_token_id).int()
    return arguments


@torch.inference_mode()
def run_reference(model: Any, prompt: Prompt, pages: Sequence[PixelPatches], **changes: Any) -> Trace:
    """`changes` are further arguments of the model."""
    layers = model.model.language_model.layers
    states: list[torch.Tensor] = []
    hooks = [layers[0].register_forward_pre_hook(_entering(states), with_kwargs=True)]
    hooks += [layer.register_forward_hook(_leaving(states)) for layer in layers]
    try:
        output = model(**{**prompt_arguments(model, prompt, pages), **changes})
    finally:
        for hook in hooks:
            hook.remove()
    return Trace(states, output.logits[0, -1])


def _entering(states: list[torch.Tensor]) -> Callable[[Any, Any, Any], None]:
    return lambda _, args, kwargs: states.append((args[0] if args else kwargs["hidden_states"])[0])


def _leaving(states: list[torch.Tensor]) -> Callable[[Any, Any, Any], None]:
    return lambda _, __, output: states.append((output[0] if isinstance(output, tuple) else output)[0])


def controls(model: Any, shape: Published, prompt: Prompt, right: Trace) -> Iterator[tuple[str, float]]:
    """The cosine of the last logits with the right ones, for faults made in transformers' model."""
    pages = prompt.pages

    def fault(pages: Sequence[PixelPatches], **changes: Any) -> float:
        return cosine(run_reference(model, prompt, pages, **changes).logits, right.logits)

    yield "images swapped", fault(pages[::-1])
    yield "one image zeroed", fault([pages[0], PixelPatches(torch.zeros_like(pages[1].pixels), pages[1].layout)])
    if shape.family == "llava":
        return
    vision = model.model.visual
    positions = torch.arange(len(prompt.token_ids), device=model.device).expand(3, 1, -1)
    yield "one-dimensional positions", fault(pages, position_ids=positions)
    if shape.family == "qwen3_vl":
        with _silenced([merger.linear_fc2 for merger in vision.deepstack_merger_list]):
            yield "deepstack dropped", fault(pages)
    if shape.family == "qwen2_5_vl":
        full_layers, vision.fullatt_block_indexes = vision.fullatt_block_indexes, list(range(len(vision.blocks)))
        yield "windows dropped", fault(pages)
        vision.fullatt_block_indexes = full_layers


@contextmanager
def _silenced(layers: Sequence[torch.nn.Module]) -> Iterator[None]:
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    kept = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter.zero_()
        yield
        for parameter, value in zip(parameters, kept, strict=True):
            parameter.copy_(value)


# The engine


class MemoryCheckpoint:
    """A checkpoint over the parameters of a model of transformers; nothing is copied."""

    def __init__(
        self, config: Mapping[str, Any], settings: Mapping[str, Any], weights: Mapping[str, torch.Tensor]
    ) -> None:
        self.config = dict(config)
        self.generation_config: dict[str, Any] = {}
        self.processor_config = dict(settings)
        self._weights = {name: weights[file] for name, file in to_canonical(weights, config["model_type"]).items()}

    def tokenizer(self) -> Tokenizer:
        raise NotImplementedError

    def names(self) -> frozenset[str]:
        return frozenset(self._weights)

    def has(self, name: str) -> bool:
        return name in self._weights

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        if name not in self._weights:
            raise missing_weight(name)
        check_shape(name, self._weights[name].shape, shape or self._weights[name].shape)
        return self._weights[name].detach()

    def stored_name(self, name: str) -> str:
        return name

    def quantized(self, name: str) -> None:
        return None


@dataclass
class RecordedLayer:
    """A decoder layer that keeps what enters and leaves it."""

    layer: Any
    entered: list[torch.Tensor] = field(default_factory=list)
    left: list[torch.Tensor] = field(default_factory=list)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, *arguments: Any) -> Any:
        self.entered.append(x if residual is None else residual + x)
        out, residual = self.layer(x, residual, *arguments)
        self.left.append(residual + out)
        return out, residual


class Ours:
    """The engine's model with what it takes to run one prompt and to look inside."""

    def __init__(self, shape: Published, reference: Any, num_tokens: int) -> None:
        dtype = reference.dtype
        self._num_blocks = -(-(num_tokens + 1) // BLOCK_SIZE)
        per_block = KVCache.bytes_per_block(ModelConfig.from_hf(shape.config), BLOCK_SIZE, dtype)
        config = EngineConfig(
            dtype=str(dtype).removeprefix("torch."),  # type: ignore[arg-type]
            device=str(reference.device),
            cache=CacheConfig(block_size=BLOCK_SIZE, memory_bytes=per_block * self._num_blocks),
        )
        checkpoint = MemoryCheckpoint(shape.config, shape.settings, reference.state_dict())
        self._runner = ModelRunner(config, checkpoint, EncoderCache(num_tokens))
        self._model: Any = self._runner._model
        self._num_tokens = num_tokens

    def run(self, prompt: ImagePrompt, chunk: int) -> Trace:
        """`chunk` tokens a step, whatever they cut through."""
        logits, decode = [], self._model.logits
        layers = self._model._layers
        recorded = [RecordedLayer(layer) for layer in layers]

        def keep(hidden: torch.Tensor) -> torch.Tensor:
            logits.append(decode(hidden))
            return logits[-1]  # type: ignore[no-any-return]

        self._model._layers, self._model.logits = recorded, keep
        self.prefill(prompt, chunk)
        self._model._layers, self._model.logits = layers, decode
        return Trace([torch.cat(recorded[0].entered), *(torch.cat(layer.left) for layer in recorded)], logits[-1][-1])

    def prefill(self, prompt: ImagePrompt, chunk: int) -> None:
        cache = self._runner.encoder.cache = EncoderCache(self._num_tokens)
        request = Request("prompt", list(prompt.token_ids), SamplingParams(temperature=0.0), images=prompt.images)
        request.block_ids = list(range(self._num_blocks))
        while (start := request.num_computed_tokens) < request.num_tokens:
            stop = min(start + chunk, request.num_tokens)
            images = tuple(
                x for x in prompt.images if start < x.end and x.offset < stop and x.content_hash not in cache
            )
            for image in images:
                cache.reserve(image.content_hash, image.length)
            self._runner.run(ScheduledBatch((advance(request, stop - start),), images))

    @torch.inference_mode()
    def encode(self, page: PixelPatches) -> None:
        self._model.encode_images([page])


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=0))
