"""Options that several commands share, declared once as dataclasses; their names are those that vLLM's users know.

A command asks for a whole group by one parameter, and the decorator puts the group's options into its signature:

    app = typer.Typer()

    @app.command()
    @with_option_groups
    def serve(port: int = 8000, engine: EngineOptions = EngineOptions()) -> None:
        client = EngineClient.start(engine.to_config())

Every command module exposes its Typer application as `app`; `mmserve.cli` imports the module when it is asked for.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from mmserve.config import (
    CacheConfig,
    DenseCopyName,
    DTypeName,
    EngineConfig,
    KVCacheDTypeName,
    LoadFormat,
    PixelsOnName,
    QuantizationName,
    SchedulerConfig,
    VisionAttentionName,
    VisionConfig,
    parse_bytes,
)
from mmserve.errors import RequestError
from mmserve.request import SamplingParams
from mmserve.vision.image_source import PixelLimits
from mmserve.vision.page_types import OcrName, PageLimits, PageOptions, RendererName

if TYPE_CHECKING:
    from mmserve.engine.client import EngineClient
    from mmserve.engine.prompt_builder import PromptBuilder
    from mmserve.vision.pages import PageReader

R = TypeVar("R")
DEFAULT_MODEL = EngineConfig.model


def _in_panel(panel: str) -> Callable[..., Any]:
    return functools.partial(typer.Option, rich_help_panel=panel)


_engine = _in_panel("Model and engine")
_pages = _in_panel("Reading pages")
_vision = _in_panel("Pictures")
_sampling = _in_panel("Sampling")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The model, and how the engine runs it."""

    model: Annotated[
        str, _engine("--model", "-m", help="A built-in name, a local folder, a .gguf file, or a hub id (org/name).")
    ] = DEFAULT_MODEL
    served_model_name: Annotated[
        list[str] | None,
        _engine(metavar="NAME", help="Name of the model in answers and requests, if not that of --model; repeatable."),
    ] = None
    load_format: Annotated[
        LoadFormat, _engine(help="Kind of weights; dummy means random ones of the right shape, for speed runs.")
    ] = "auto"
    quantization: Annotated[
        QuantizationName,
        _engine(
            help="How weights are held: auto is as the checkpoint has them; fp8 also makes them of full precision."
        ),
    ] = "auto"
    dense_copy: Annotated[
        DenseCopyName,
        _engine(
            help="Weights of few bits in 16 bits, too: faster for many rows, and more memory. auto keeps them where"
            " they take a quarter of what is free at most; never saves memory before time."
        ),
    ] = "auto"
    dtype: Annotated[DTypeName, _engine(help="Number format of the weights and activations.")] = "auto"
    device: Annotated[str, _engine(help="auto, cpu, cuda or cuda:N.")] = "auto"
    num_threads: Annotated[
        int | None, _engine(min=1, help="CPU threads of the engine, if not one for each core.", show_default=False)
    ] = None
    max_model_len: Annotated[
        int | None, _engine(min=1, help="Tokens of prompt and answer together; as the model says if not given.")
    ] = None
    max_num_seqs: Annotated[
        int | None, _engine(min=1, help="Sequences that run at once: 64 on a CPU, 256 on a GPU if not given.")
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        _engine(
            min=1,
            help="Tokens computed in one step: 2048 on a CPU, 8192 on a GPU if not given; longer prompts are done in"
            " chunks.",
        ),
    ] = None
    max_num_waiting: Annotated[int, _engine(min=1, help="Requests that may wait; more are refused.")] = (
        SchedulerConfig.max_num_waiting
    )
    max_encoder_tokens: Annotated[
        int, _engine(min=1, help="Image tokens that the vision encoder computes in one step; one image may be more.")
    ] = SchedulerConfig.max_encoder_tokens
    encoder_cache_tokens: Annotated[int, _engine(min=1, help="Image tokens that are kept once they were encoded.")] = (
        SchedulerConfig.encoder_cache_tokens
    )
    vision_attention: Annotated[
        VisionAttentionName,
        _engine(help="What computes the attention of the vision encoder; auto is what is fastest on the device."),
    ] = "auto"
    pixels_on: Annotated[
        PixelsOnName,
        _engine(help="Where pictures are scaled and cut: in a worker or on the device; auto is there on a GPU."),
    ] = "auto"
    block_size: Annotated[int, _engine(min=1, help="Tokens in one block of the KV cache.")] = CacheConfig.block_size
    kv_cache_dtype: Annotated[
        KVCacheDTypeName, _engine(help="Number format of the KV cache: auto is that of the activations; fp8 halves it.")
    ] = CacheConfig.dtype
    kv_cache_memory_bytes: Annotated[
        str | None, _engine(metavar="SIZE", help="Memory of the KV cache, such as 512MiB; 2GiB on a CPU.")
    ] = None
    gpu_memory_utilization: Annotated[
        float | None,
        _engine(help="Without --kv-cache-memory-bytes: share of the device's memory to use, capped by what is free."),
    ] = None
    enable_prefix_caching: Annotated[
        bool, _engine(help="Keep what was computed for a prompt, for others that begin alike.")
    ] = CacheConfig.enable_prefix_caching
    seed: Annotated[int, _engine(help="Seed of random sampling.")] = EngineConfig.seed
    enforce_eager: Annotated[
        bool, _engine("--enforce-eager", help="Decode without CUDA graphs, on a CPU without recorded steps.")
    ] = EngineConfig.enforce_eager
    async_scheduling: Annotated[
        bool | None,
        _engine(help="Prepare a step while the one before it runs; on a GPU only if not given.", show_default=False),
    ] = None
    engine_process: Annotated[
        bool, _engine("--engine-process/--engine-thread", help="Run the engine in a process or a thread of its own.")
    ] = EngineConfig.use_process
    max_engine_restarts: Annotated[
        int,
        _engine(min=0, help="How often in ten minutes an engine process that dies is started again."),
    ] = EngineConfig.max_engine_restarts
    engine_timeout: Annotated[
        float,
        _engine(
            help="Seconds without a sign of life after which an engine process counts as dead; no step may take longer."
        ),
    ] = EngineConfig.engine_timeout

    def to_config(self) -> EngineConfig:
        """Raises `RequestError` (`invalid_request`) naming the option at fault."""
        size = self.kv_cache_memory_bytes
        return EngineConfig(
            model=self.model,
            served_model_name=tuple(self.served_model_name or ()),
            dtype=self.dtype,
            load_format=self.load_format,
            quantization=self.quantization,
            dense_copy=self.dense_copy,
            device=self.device,
            max_model_len=self.max_model_len,
            seed=self.seed,
            num_threads=self.num_threads,
            use_process=self.engine_process,
            max_engine_restarts=self.max_engine_restarts,
            engine_timeout=self.engine_timeout,
            enforce_eager=self.enforce_eager,
            async_scheduling=self.async_scheduling,
            cache=CacheConfig(
                block_size=self.block_size,
                memory_bytes=None if size is None else parse_bytes(size),
                memory_utilization=self.gpu_memory_utilization,
                enable_prefix_caching=self.enable_prefix_caching,
                dtype=self.kv_cache_dtype,
            ),
            scheduler=SchedulerConfig.for_device(
                self.device,
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
                max_num_waiting=self.max_num_waiting,
                max_encoder_tokens=self.max_encoder_tokens,
                encoder_cache_tokens=self.encoder_cache_tokens,
            ),
            vision=VisionConfig(attention=self.vision_attention, pixels_on=self.pixels_on),
        )


@dataclass(frozen=True, kw_only=True)
class DocumentOptions:
    """How pages are turned into text, and what is refused."""

    ocr: Annotated[OcrName, _pages(help="How to read pages without a text layer that can be trusted.")] = "auto"
    renderer: Annotated[RendererName, _pages(help="What draws PDF pages that need OCR.")] = "auto"
    dpi: Annotated[int, _pages(help="Resolution at which PDF pages are drawn for OCR.")] = PageOptions.dpi
    page_workers: Annotated[int, _pages(min=1, help="Processes that read pages.")] = 2
    max_pages: Annotated[int, _pages(help="Refuse documents of more pages.")] = PageLimits.max_pages
    max_file_bytes: Annotated[str, _pages(metavar="SIZE", help="Refuse larger files.")] = "200MiB"
    max_page_pixels: Annotated[int, _pages(help="Refuse pictures of more pixels, and draw no page larger.")] = (
        PageLimits.max_pixels
    )
    page_timeout: Annotated[
        float,
        _pages(help="Seconds that the work on one page may take; more by the clock on a busy machine."),
    ] = PageLimits.page_timeout

    def to_limits(self) -> PageLimits:
        return PageLimits(
            max_pages=self.max_pages,
            max_bytes=parse_bytes(self.max_file_bytes),
            max_pixels=self.max_page_pixels,
            page_timeout=self.page_timeout,
        )

    def open_reader(self) -> "PageReader":
        """A reader with these options; close it when done. Raises `RequestError` naming the option at fault."""
        from mmserve.vision.pages import PageReader

        limits = self.to_limits()
        options = PageOptions(ocr=self.ocr, renderer=self.renderer, dpi=self.dpi)
        return PageReader(limits=limits, options=options, num_workers=self.page_workers)


@dataclass(frozen=True, kw_only=True)
class VisionOptions:
    """How pictures and page images get to a model that takes them."""

    max_pixels: Annotated[
        int | None, _vision(min=1, help="Scale each picture and page down to this; as the model says if not given.")
    ] = None
    min_pixels: Annotated[
        int | None, _vision(min=1, help="Scale each picture and page up to this; as the model says if not given.")
    ] = None
    num_preprocess_workers: Annotated[int, _vision(min=1, help="Processes that prepare pictures and pages.")] = 2

    def to_limits(self) -> PixelLimits:
        """Raises `RequestError` (`invalid_request`) for limits that contradict."""
        if self.min_pixels and self.max_pixels and self.min_pixels > self.max_pixels:
            raise RequestError("invalid_request", "--min-pixels must not exceed --max-pixels", param="min_pixels")
        return PixelLimits(self.min_pixels, self.max_pixels)

    def open_prompts(self, client: "EngineClient", pages: PageLimits) -> "PromptBuilder":
        """What turns messages into prompts of the client's model; close it when done."""
        from mmserve.engine.prompt_factory import open_prompts

        return open_prompts(client, num_workers=self.num_preprocess_workers, limits=self.to_limits(), pages=pages)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How the next token is chosen."""

    max_tokens: Annotated[
        int | None, _sampling(min=1, help="Longest answer in tokens; up to the context's end if not given.")
    ] = None
    temperature: Annotated[float, _sampling(help="0 always takes the likeliest token; higher is more varied.")] = (
        SamplingParams.temperature
    )
    top_p: Annotated[float, _sampling(help="Choose among the likeliest tokens of this total probability.")] = 1.0
    top_k: Annotated[int, _sampling(help="Choose among this many of the likeliest tokens; 0 is off.")] = 0
    min_p: Annotated[float, _sampling(help="Leave out tokens less likely than this share of the likeliest.")] = 0.0
    presence_penalty: Annotated[float, _sampling(help="Positive: avoid tokens that were used (-2 to 2).")] = 0.0
    frequency_penalty: Annotated[float, _sampling(help="Positive: avoid tokens by how often used (-2 to 2).")] = 0.0
    repetition_penalty: Annotated[float, _sampling(help="Above 1: avoid tokens of prompt and answer.")] = 1.0
    stop: Annotated[
        list[str] | None, _sampling(metavar="TEXT", help="End the answer before this text; repeatable.")
    ] = None

    def to_params(self) -> SamplingParams:
        """Raises `RequestError` (`invalid_request`) naming the option at fault."""
        values = dataclasses.asdict(self) | {"stop": tuple(self.stop or ())}
        return SamplingParams(**values)


def with_option_groups(command: Callable[..., R]) -> Callable[..., R]:
    """Replace each parameter whose type is a dataclass by that dataclass' fields, and build it again when called.

    A parameter's default, if it has one, is an instance whose values become the options' defaults.
    """
    hints = get_type_hints(command, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if name != "return" and dataclasses.is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        parameters += (
            _group_parameters(groups[name], parameter.default)
            if name in groups
            else [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])]
        )

    @functools.wraps(command)
    def call(**values: Any) -> R:
        built = {name: _take_group(group, values) for name, group in groups.items()}
        return command(**built, **values)

    annotations = {parameter.name: parameter.annotation for parameter in parameters}
    call.__annotations__ = annotations | {"return": hints.get("return", Any)}
    vars(call)["__signature__"] = inspect.Signature(parameters)
    return call


def _group_parameters(group: Any, defaults: Any) -> list[inspect.Parameter]:
    source = group() if defaults is inspect.Parameter.empty else defaults
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=getattr(source, field.name),
            annotation=hints[field.name],
        )
        for field in dataclasses.fields(group)
    ]


def _take_group(group: Any, values: dict[str, Any]) -> Any:
    return group(**{field.name: values.pop(field.name) for field in dataclasses.fields(group)})
