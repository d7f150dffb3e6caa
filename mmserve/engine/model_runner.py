"""From a scheduled batch to tensors, logits and token ids. Owns the device, the weights and the paged tensors."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from mmserve.attention.base import AttentionBackend
from mmserve.attention.context import ForwardContext
from mmserve.attention.torch_backend import TorchAttention
from mmserve.cache.encoder_cache import EncoderCache
from mmserve.cache.kv_cache import KVCache
from mmserve.config import DTypeName, EngineConfig, KVCacheDTypeName, ModelConfig
from mmserve.engine.encoder_runner import EncoderRunner, Seconds, no_time
from mmserve.engine.memory import cache_bytes, fit_context, keeps_dense_copy, tensor_bytes, wanted_context
from mmserve.engine.sampler import PendingTokens, Sampler
from mmserve.engine.scheduler import ScheduledBatch, advance
from mmserve.engine.step_inputs import InputBuilder, StepInputs
from mmserve.engine.warm_up import warm_up_batches
from mmserve.errors import EngineError, SetupError
from mmserve.kernels.compiled import can_attend
from mmserve.kernels.transfer import to_device
from mmserve.layers.mrope import MultiAxisRotaryTable, has_multiple_axes
from mmserve.layers.rotary import RotaryTable
from mmserve.models.registry import model_class
from mmserve.quantization.registry import choose_scheme
from mmserve.quantization.scheme import has_fp8_products
from mmserve.request import SampledToken, SamplingParams, Sequence
from mmserve.vision.pixel_loader import PixelLoader
from mmserve.vision.preprocess import load_processor
from mmserve.vision.process_memory import bound_primitive_caches, is_out_of_memory, keep_freed_memory
from mmserve.weights.checkpoint import Checkpoint
from mmserve.weights.layer_loader import LayerLoader
from mmserve.weights.loader import WeightReader

if TYPE_CHECKING:
    # The first needs Triton, which a CPU build of torch does not bring; the second compiled kernels.
    from mmserve.engine.cuda_graph import DecodeGraphs, DecodeTensors
    from mmserve.engine.recorded_step import RecordedStep


# By which the scales of an FP8 cache are found.
_CALIBRATION_TOKENS = 256
# Rows of logits that are held at once while a prompt is measured.
_LOGPROB_ROWS = 256


class PendingStep:
    """A step that was launched; `take` waits for its tokens. `encoder_seconds` are known when it was computed."""

    def __init__(self, request_ids: list[str], tokens: PendingTokens | None, encoding: Seconds = no_time) -> None:
        self._request_ids = request_ids
        self._tokens = tokens
        self.encoder_seconds = encoding

    def take(self) -> Mapping[str, SampledToken]:
        """By request, for those whose last token was reached."""
        return dict(zip(self._request_ids, self._tokens.take(), strict=True)) if self._tokens else {}


class ModelRunner:
    """`num_steps_ahead` is how many steps may be launched before the oldest one's tokens are taken."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, encoder_cache: EncoderCache) -> None:
        """Load the model, size and allocate the KV cache. Raises `SetupError` if a weight or memory is missing."""
        self.device = choose_device(config.device)
        if self.device.type == "cpu":
            keep_freed_memory()
            bound_primitive_caches()
            if config.num_threads:
                torch.set_num_threads(config.num_threads)
        self.model_config = ModelConfig.from_hf(checkpoint.config, checkpoint.generation_config)
        self.dtype = choose_dtype(config.dtype, self.model_config, self.device)
        self._cache_dtype = choose_cache_dtype(config.cache.dtype, self.dtype, self.device)
        is_ahead = self.device.type == "cuda" if config.async_scheduling is None else config.async_scheduling
        self.num_steps_ahead = int(is_ahead)
        self.block_size = config.cache.block_size
        self._config = config
        is_on_cpu = self.device.type == "cpu"
        self._is_compiled = is_on_cpu and can_attend(self.dtype, self._cache_dtype, self.model_config.head_dim)
        self._attention = self._attention_backend()
        reader = WeightReader(checkpoint)
        scheme = choose_scheme(checkpoint.config, config.quantization)
        keeps_copy = keeps_dense_copy(config.dense_copy, self.model_config, config.cache, self.device)
        loader = LayerLoader(
            reader,
            self.dtype,
            self.device,
            config.vision.attention,
            scheme,
            keeps_copy=keeps_copy,
            is_small=config.dense_copy == "never",
        )
        self._model = model_class(self.model_config.architecture)(loader, self.model_config, self._attention)
        reader.finish()
        pixels = PixelLoader(load_processor(checkpoint), self.device)
        self.encoder = EncoderRunner(self._model, encoder_cache, pixels, self.device)
        self._sampler = Sampler(eos_token_ids=self.model_config.eos_token_ids)
        self._has_multiple_axes = has_multiple_axes(self.model_config.rope)
        self._inputs = InputBuilder(has_multiple_axes=self._has_multiple_axes)
        self._sampled_rows: dict[Sequence, int] = {}
        self._sampled_ids = torch.zeros(config.scheduler.max_num_seqs, dtype=torch.int64, device=self.device)
        self._replayed: DecodeGraphs | RecordedStep | None = None
        wanted = wanted_context(config, self.model_config.max_context)
        self._rotary = self._rotary_table(wanted)
        bytes_per_block = KVCache.bytes_per_block(self.model_config, self.block_size, self._cache_dtype)
        num_bytes = cache_bytes(config.cache, self.device, self._num_activation_bytes(wanted))
        self.max_model_len, num_blocks = fit_context(config, wanted, num_bytes, bytes_per_block)
        self.kv_cache = self._kv_cache(num_blocks)

    @property
    def reads_images(self) -> bool:
        return self.encoder.reads_images

    @torch.inference_mode()
    def run(self, batch: ScheduledBatch) -> PendingStep:
        """One step: write K and V of every scheduled token, and sample where a sequence's last token was reached.

        Raises `EngineError` for what costs this batch alone: `insufficient_memory`, or pixels that are gone.
        """
        if not batch.sequences:
            return PendingStep([], None)
        try:
            return self._launch(batch)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise self._out_of_memory(batch) from error
        except FileNotFoundError as error:
            message = "a picture's pixels are gone from shared memory: does another program clear /dev/shm?"
            raise EngineError("internal_error", message) from error

    @torch.inference_mode()
    def prompt_logprobs(self, token_ids: list[int], first: int) -> torch.Tensor:
        """Log-probability of each token from the `first` (at least 1) on, given all before: float32 `[T - first]`.

        For measuring: writes to the start of the KV cache, which nothing else may be using. T is at most what a step
        may have.
        """
        num_tokens = len(token_ids)
        blocks = list(range(-(-num_tokens // self.block_size)))
        sequence = Sequence("prompt", token_ids, SamplingParams(), block_ids=blocks)
        hidden = self._forward(self._inputs.build((advance(sequence, num_tokens),), {}))
        targets = torch.tensor(token_ids, device=self.device)
        parts = []
        for start in range(first, num_tokens, _LOGPROB_ROWS):
            end = min(start + _LOGPROB_ROWS, num_tokens)
            logprobs = self._model.logits(hidden[start - 1 : end - 1]).float().log_softmax(-1)
            parts.append(logprobs.gather(1, targets[start:end, None])[:, 0])
        return torch.cat(parts).cpu()

    @property
    def num_weight_bytes(self) -> int:
        """What the model's tensors take in memory, in whatever form they are held."""
        return tensor_bytes(self._model)

    def _launch(self, batch: ScheduledBatch) -> PendingStep:
        encoder_seconds = self.encoder.encode(batch.images)
        inputs = self._inputs.build(batch.sequences, self._sampled_rows)
        sampling = inputs.sampling
        best: torch.Tensor | None
        if self._replayed is not None and self._replayed.takes(inputs):
            logits, best = self._replayed.replay(inputs)
        else:
            hidden = self._forward(inputs)
            if not sampling:
                return PendingStep([], None, encoder_seconds)
            logits = self._model.logits(hidden.index_select(0, to_device(inputs.last_tokens, self.device)))
            best = self._best(logits)
        sequences = [scheduled.sequence for scheduled in sampling]
        counts = [scheduled.num_output_tokens for scheduled in sampling]
        tokens = self._sampler.sample(logits, sequences, counts, best)
        self._keep(sequences, tokens)
        return PendingStep([sequence.request_id for sequence in sequences], tokens, encoder_seconds)

    def _out_of_memory(self, batch: ScheduledBatch) -> EngineError:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        pictures = f" and {len(batch.images)} pictures" if batch.images else ""
        return EngineError(
            "insufficient_memory",
            f"a step of {batch.num_tokens} tokens{pictures} ran out of memory, and its requests with it: lower"
            " --max-num-batched-tokens, --max-encoder-tokens, --kv-cache-memory-bytes or --gpu-memory-utilization, or"
            " close other programs",
        )

    def warm_up(self) -> None:
        """Run what is lazy or has to be compiled, and capture the graphs, so that no request pays for it."""
        scheduler, on_gpu = self._config.scheduler, self.device.type == "cuda"
        if self._cache_dtype is not self.dtype:
            self._fit_kv_scales()
        for batch in warm_up_batches(
            scheduler, max_model_len=self.max_model_len, block_size=self.block_size, on_gpu=on_gpu
        ):
            self.run(batch).take()
        if not self._config.enforce_eager:
            self._replayed = self._capture() if on_gpu else self._record()

    @torch.inference_mode()
    def _fit_kv_scales(self) -> None:
        """Scales of K and V by what the layers make of tokens from the whole vocabulary."""
        length = min(_CALIBRATION_TOKENS, self.max_model_len - 1, self.kv_cache.num_blocks * self.block_size)
        token_ids = [i * self.model_config.vocab_size // length for i in range(length)]
        block_ids = list(range(-(-length // self.block_size)))
        sequence = Sequence("calibration", token_ids, SamplingParams(), block_ids=block_ids)
        self._forward(self._inputs.build([advance(sequence, length)], {}), fits_scales=True)

    def _forward(self, inputs: StepInputs, *, fits_scales: bool = False) -> torch.Tensor:
        """Hidden states of every token `[T, hidden]`, without a graph."""
        token_ids = to_device(inputs.token_ids, self.device)
        if inputs.sources is not None:
            token_ids = self._resolved(token_ids, to_device(inputs.sources, self.device))
        embedded, deepstack = self.encoder.place(self._model.embed(token_ids), inputs.rows)
        cos, sin = self._rotary.at(to_device(inputs.positions, self.device))
        metadata = self._attention.prepare(inputs.attention)
        context = ForwardContext(cos, sin, self.kv_cache.layers, metadata, fits_scales)
        return self._model.forward(embedded, context, deepstack)

    def _resolved(self, token_ids: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
        """Token ids with those filled in that the step before has sampled."""
        return torch.where(sources < 0, token_ids, self._sampled_ids[sources.clamp(min=0)])

    def _keep(self, sequences: list[Sequence], tokens: PendingTokens) -> None:
        """The next step may need the tokens before the host has seen them."""
        if self.num_steps_ahead:
            self._sampled_ids[: len(sequences)] = tokens.token_ids
            self._sampled_rows = {sequence: row for row, sequence in enumerate(sequences)}

    def _best(self, logits: torch.Tensor) -> torch.Tensor | None:
        if self.device.type != "cuda":
            return None
        from mmserve.kernels.sampling import argmax

        return argmax(logits)

    @torch.inference_mode()
    def _record(self) -> "RecordedStep | None":
        """None where PyTorch computes a part of the layers."""
        if not self._is_compiled:
            return None
        from mmserve.engine.recorded_step import RecordedStep

        step = RecordedStep(
            self._model,
            self._rotary,
            self.kv_cache.layers,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            num_axes=3 if self._has_multiple_axes else 1,
        )
        return step if step.is_complete else None

    @torch.inference_mode()
    def _capture(self) -> "DecodeGraphs":
        from mmserve.engine.cuda_graph import DecodeGraphs

        graphs = DecodeGraphs(
            self._decode,
            max_num_seqs=self._config.scheduler.max_num_seqs,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            num_axes=3 if self._has_multiple_axes else 1,
            device=self.device,
        )
        graphs.capture()
        return graphs

    def _decode(self, tensors: "DecodeTensors") -> tuple[torch.Tensor, torch.Tensor]:
        embedded = self._model.embed(self._resolved(tensors.token_ids, tensors.sources))
        cos, sin = self._rotary.at(tensors.positions)
        hidden = self._model.forward(embedded, ForwardContext(cos, sin, self.kv_cache.layers, tensors.attention))
        logits = self._model.logits(hidden)
        best = self._best(logits)
        assert best is not None
        return logits, best

    @torch.inference_mode()
    def _num_activation_bytes(self, max_model_len: int) -> int:
        """What the largest step takes on a GPU at its peak, found by running it on a cache of its own."""
        if self.device.type != "cuda":
            return 0
        scheduler = self._config.scheduler
        length = min(scheduler.max_num_batched_tokens, max_model_len - 1)
        num_sequences = min(scheduler.max_num_batched_tokens // length, scheduler.max_num_seqs)
        num_blocks = -(-length // self.block_size)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self.kv_cache = self._kv_cache(num_blocks)
        held = torch.cuda.memory_allocated(self.device) - before
        sequences = [
            Sequence(str(i), [0] * length, SamplingParams(temperature=0.0), block_ids=list(range(num_blocks)))
            for i in range(num_sequences)
        ]
        self.run(ScheduledBatch(tuple(advance(sequence, length) for sequence in sequences))).take()
        rows = torch.zeros(scheduler.max_num_seqs, self.model_config.hidden_size, dtype=self.dtype, device=self.device)
        self._sampler.sample(self._model.logits(rows), [Sequence("", [0], SamplingParams())] * len(rows)).take()
        if self.reads_images:
            self.encoder.warm_up(scheduler.max_encoder_tokens)
        del self.kv_cache
        return torch.cuda.max_memory_allocated(self.device) - before - held

    def _kv_cache(self, num_blocks: int) -> KVCache:
        return KVCache(
            self.model_config,
            num_blocks=num_blocks,
            block_size=self.block_size,
            dtype=self._cache_dtype,
            device=self.device,
        )

    def _attention_backend(self) -> AttentionBackend:
        config = self.model_config
        if self.device.type == "cuda":
            from mmserve.attention.triton_backend import TritonAttention

            return TritonAttention(
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                block_size=self.block_size,
                device=self.device,
            )
        backend = TorchAttention
        if self._is_compiled:
            from mmserve.attention.compiled_backend import CompiledAttention

            backend = CompiledAttention
        return backend(
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=self.block_size,
            dtype=self.dtype,
            rounds_kv=self._cache_dtype is not self.dtype,
        )

    def _rotary_table(self, max_positions: int) -> RotaryTable | MultiAxisRotaryTable:
        config, head_dim = self.model_config.rope, self.model_config.head_dim
        table = RotaryTable(
            config, head_dim=head_dim, max_positions=max_positions, dtype=self.dtype, device=self.device
        )
        if not self._has_multiple_axes:
            return table
        assert config.scaling is not None
        return MultiAxisRotaryTable(table, config.scaling, head_dim, self.device)


def choose_device(name: str) -> torch.device:
    """`auto` is a GPU if there is one. `SetupError` for a device that cannot be used."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise SetupError("model_unavailable", f"--device {name} cannot be used here: {error}") from None
    return device


def choose_cache_dtype(name: KVCacheDTypeName, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """That of the activations, or FP8. `SetupError` for a GPU that has no FP8."""
    if name == "auto":
        return dtype
    if device.type == "cuda" and not has_fp8_products(device):
        raise SetupError(
            "model_unavailable",
            "--kv-cache-dtype fp8 needs a GPU of compute capability 8.9 or later (Ada, Hopper): leave the option out",
            param="kv-cache-dtype",
        )
    return torch.float8_e4m3fn


def choose_dtype(name: DTypeName, model: ModelConfig, device: torch.device) -> torch.dtype:
    """`auto` is the checkpoint's precision on a GPU; on a CPU bfloat16 where it computes in it, else float32."""
    if name == "auto" and device.type == "cpu":
        return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
    dtype: torch.dtype = getattr(torch, model.dtype if name == "auto" else name)
    return dtype
