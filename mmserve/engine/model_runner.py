"""From a scheduled batch to tensors, logits and token ids. Owns the device, the weights and the paged tensors."""

import time
from collections.abc import Sequence as Rows
from weakref import WeakKeyDictionary

import numpy as np
import psutil
import torch

from mmserve.attention.base import AttentionBatch
from mmserve.attention.context import ForwardContext
from mmserve.attention.torch_backend import TorchAttention
from mmserve.cache.encoder_cache import EncoderCache
from mmserve.cache.kv_cache import KVCache
from mmserve.config import GIB, CacheConfig, DTypeName, EngineConfig, ModelConfig
from mmserve.engine.sampler import Sampler
from mmserve.engine.scheduler import ScheduledBatch, ScheduledSequence
from mmserve.errors import SetupError
from mmserve.layers.mrope import MultiAxisRotaryTable, PromptPositions, has_multiple_axes
from mmserve.layers.rotary import RotaryTable
from mmserve.models.registry import VisionLanguageModel, model_class
from mmserve.request import ImageSpan, SampledToken, SamplingParams, Sequence
from mmserve.vision.pixel_loader import PixelLoader
from mmserve.vision.preprocess import load_processor
from mmserve.weights.checkpoint import Checkpoint
from mmserve.weights.layer_loader import LayerLoader
from mmserve.weights.loader import WeightReader

_CPU_DEFAULT_BYTES = 2 * GIB


class ModelRunner:
    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, encoder_cache: EncoderCache) -> None:
        """Load the model, size and allocate the KV cache. Raises `SetupError` if a weight or memory is missing."""
        self.device = choose_device(config.device)
        if self.device.type == "cpu" and config.num_threads:
            torch.set_num_threads(config.num_threads)
        self.model_config = ModelConfig.from_hf(checkpoint.config, checkpoint.generation_config)
        self.dtype = choose_dtype(config.dtype, self.model_config, self.device)
        self.block_size = config.cache.block_size
        self.encoder_cache = encoder_cache
        backend = TorchAttention(
            num_kv_heads=self.model_config.num_kv_heads,
            head_dim=self.model_config.head_dim,
            block_size=self.block_size,
            dtype=self.dtype,
            device=self.device,
        )
        self._attention = backend
        reader = WeightReader(checkpoint)
        loader = LayerLoader(reader, self.dtype, self.device, config.vision.attention)
        self._pixels = PixelLoader(load_processor(checkpoint), self.device)
        self._model = model_class(self.model_config.architecture)(loader, self.model_config, backend)
        reader.finish()
        self.max_model_len, num_blocks = self._size_cache(config)
        self._has_multiple_axes = has_multiple_axes(self.model_config.rope)
        self._prompt_positions: WeakKeyDictionary[Sequence, PromptPositions] = WeakKeyDictionary()
        self._rotary = self._rotary_table()
        self.kv_cache = KVCache(
            self.model_config, num_blocks=num_blocks, block_size=self.block_size, dtype=self.dtype, device=self.device
        )
        self._sampler = Sampler(eos_token_ids=self.model_config.eos_token_ids)

    @torch.inference_mode()
    def run(self, batch: ScheduledBatch) -> dict[str, SampledToken]:
        """One step: write K and V of every scheduled token, and sample where a sequence's last token was reached."""
        rows = sorted(batch.sequences, key=_row_order)
        if not rows:
            return {}
        token_ids = [token for scheduled in rows for token in _scheduled_tokens(scheduled)]
        self._encode(batch.images)
        embedded, deepstack = self._embed(token_ids, rows)
        hidden = self._model.forward(embedded, self._context(rows), deepstack)
        sampling = [scheduled.sequence for scheduled in rows if scheduled.samples]
        if not sampling:
            return {}
        logits = self._model.logits(hidden.index_select(0, self._tensor(_last_rows(rows))))
        sampled = self._sampler.sample(logits, sampling)
        return {sequence.request_id: token for sequence, token in zip(sampling, sampled, strict=True)}

    def _rotary_table(self) -> RotaryTable | MultiAxisRotaryTable:
        config, head_dim = self.model_config.rope, self.model_config.head_dim
        table = RotaryTable(
            config, head_dim=head_dim, max_positions=self.max_model_len, dtype=self.dtype, device=self.device
        )
        if not self._has_multiple_axes:
            return table
        assert config.scaling is not None
        return MultiAxisRotaryTable(table, config.scaling, head_dim, self.device)

    @property
    def reads_images(self) -> bool:
        return isinstance(self._model, VisionLanguageModel)

    def warm_up(self, max_num_batched_tokens: int) -> None:
        """Run a prompt and a decoding step in block 0, so that the first request does not pay for what is lazy."""
        length = min(max_num_batched_tokens, self.max_model_len - 1, self.block_size)
        sequence = Sequence("warm-up", [0] * length, SamplingParams(temperature=0.0), block_ids=[0])
        for num_tokens in (length, 1):
            sequence.num_computed_tokens = length - num_tokens
            self.run(ScheduledBatch((ScheduledSequence(sequence, num_tokens),)))

    def _context(self, rows: Rows[ScheduledSequence]) -> ForwardContext:
        cos, sin = self._rotary.at(self._positions(rows))
        attention = AttentionBatch(
            query_lens=[scheduled.num_scheduled_tokens for scheduled in rows],
            context_lens=[_context_len(scheduled) for scheduled in rows],
            block_tables=[scheduled.sequence.block_ids for scheduled in rows],
        )
        return ForwardContext(cos, sin, self.kv_cache.layers, self._attention.prepare(attention))

    def _positions(self, rows: Rows[ScheduledSequence]) -> torch.Tensor:
        """`[T]`, or `[3, T]` for a model whose positions have three axes."""
        if not self._has_multiple_axes:
            return self._tensor([position for scheduled in rows for position in _scheduled_positions(scheduled)])
        pieces = []
        for scheduled in rows:
            sequence = scheduled.sequence
            if sequence not in self._prompt_positions:
                positions = PromptPositions(len(sequence.prompt_token_ids), sequence.images)
                self._prompt_positions[sequence] = positions
            pieces.append(self._prompt_positions[sequence].slice(sequence.num_computed_tokens, _context_len(scheduled)))
        return torch.from_numpy(np.concatenate(pieces, axis=1)).to(self.device)

    def _encode(self, images: Rows[ImageSpan]) -> None:
        """All images of a step in one packed batch, into the encoder cache."""
        if not images:
            return
        assert isinstance(self._model, VisionLanguageModel)
        started = time.perf_counter()
        patches = self._pixels.load(images)
        for image, embeddings in zip(images, self._model.encode_images(patches), strict=True):
            # A copy: slices of one batch would keep the whole of it alive as long as the last of them.
            self.encoder_cache.put(image.content_hash, embeddings.clone() if len(images) > 1 else embeddings)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.encoder_cache.work.add(sum(image.length for image in images), time.perf_counter() - started)

    def _embed(self, token_ids: list[int], rows: Rows[ScheduledSequence]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Embeddings `[T, hidden]`, those of images in the placeholders' rows; and the deepstack features if any."""
        embedded = self._model.embed(self._tensor(token_ids))
        hidden, features, first_row = embedded.shape[1], None, 0
        for scheduled in rows:
            start, stop = scheduled.sequence.num_computed_tokens, _context_len(scheduled)
            for image in scheduled.sequence.images:
                a, b = max(image.offset, start), min(image.end, stop)
                if a < b:
                    values = self.encoder_cache.get(image.content_hash)[a - image.offset : b - image.offset]
                    if features is None:
                        features = embedded.new_zeros(len(token_ids), values.shape[1] - hidden)
                    target = slice(first_row + a - start, first_row + b - start)
                    embedded[target], features[target] = values[:, :hidden], values[:, hidden:]
            first_row += stop - start
        if features is None or features.shape[1] == 0:
            return embedded, []
        return embedded, list(torch.split(features, hidden, dim=1))

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _size_cache(self, config: EngineConfig) -> tuple[int, int]:
        """The context's length and the number of blocks. A context that was asked for and does not fit is an error."""
        bytes_per_block = KVCache.bytes_per_block(self.model_config, self.block_size, self.dtype)
        num_blocks = _cache_bytes(config.cache, self.device) // bytes_per_block
        wanted = config.max_model_len or self.model_config.max_context
        if wanted > self.model_config.max_context:
            raise SetupError(
                "model_unavailable",
                f"--max-model-len {wanted} exceeds the {self.model_config.max_context} positions that the model has",
            )
        needed = -(-wanted // self.block_size) * bytes_per_block
        if num_blocks == 0 or (config.max_model_len and num_blocks * bytes_per_block < needed):
            raise SetupError(
                "insufficient_memory",
                f"a context of {wanted} tokens needs {needed / GIB:.2f} GiB of KV cache, but there are"
                f" {num_blocks * bytes_per_block / GIB:.2f} GiB: raise --kv-cache-memory-bytes or"
                " --gpu-memory-utilization, or lower --max-model-len",
            )
        return min(wanted, num_blocks * self.block_size), num_blocks


def _row_order(scheduled: ScheduledSequence) -> tuple[bool, int]:
    """Single queries first, longest context first, as `AttentionBatch` asks."""
    return scheduled.num_scheduled_tokens > 1, -_context_len(scheduled)


def _context_len(scheduled: ScheduledSequence) -> int:
    return scheduled.sequence.num_computed_tokens + scheduled.num_scheduled_tokens


def _scheduled_positions(scheduled: ScheduledSequence) -> range:
    return range(scheduled.sequence.num_computed_tokens, _context_len(scheduled))


def _scheduled_tokens(scheduled: ScheduledSequence) -> list[int]:
    return scheduled.sequence.tokens(scheduled.sequence.num_computed_tokens, _context_len(scheduled))


def _last_rows(rows: Rows[ScheduledSequence]) -> list[int]:
    last_rows, end = [], 0
    for scheduled in rows:
        end += scheduled.num_scheduled_tokens
        if scheduled.samples:
            last_rows.append(end - 1)
    return last_rows


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


def choose_dtype(name: DTypeName, model: ModelConfig, device: torch.device) -> torch.dtype:
    """`auto` is the checkpoint's precision on a GPU; on a CPU bfloat16 where it computes in it, else float32."""
    if name == "auto" and device.type == "cpu":
        return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
    dtype: torch.dtype = getattr(torch, model.dtype if name == "auto" else name)
    return dtype


def _cache_bytes(config: CacheConfig, device: torch.device) -> int:
    """Bytes for the KV cache: as asked (`SetupError` if not free), else a share of the total, at most what is free."""
    if device.type == "cuda":
        # What an earlier engine of this process left with the allocator is free too.
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        default = int(total * 0.9) - (total - free)
    else:
        memory = psutil.virtual_memory()
        free, total = memory.available, memory.total
        default = _CPU_DEFAULT_BYTES
    if config.memory_bytes is not None:
        if config.memory_bytes > free:
            raise SetupError(
                "insufficient_memory",
                f"--kv-cache-memory-bytes asks for {config.memory_bytes / GIB:.2f} GiB, but {free / GIB:.2f} GiB are"
                " free: ask for less, or close other programs",
            )
        return config.memory_bytes
    share = default if config.memory_utilization is None else int(total * config.memory_utilization) - (total - free)
    return max(min(share, free), 0)
