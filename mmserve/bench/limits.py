"""What a device allows at best: the operations and bytes of a workload against the device's measured ceilings.

A phase takes at least the longer of `operations / (operations a second)` and `bytes / (bytes a second)` (the roofline
of Williams et al. 2009); a workload takes at least the sum of its phases: pictures through the vision tower, prompts
through the decoder, then one decoding step after the other, all sequences in each. Counted are

- products with weights: 2 operations for each weight and row; the head only for rows that are sampled;
- attention: 4 operations for each query, key and channel of a query head, causal ones for the keys that are seen;
- weights, read once by each phase (the vision tower, all prompts together, each decoding step), in the precision of
  computation; of the embedding only rows are read, which are left out, as are norms and biases;
- keys and values, written once; read once by each decoding step, a common beginning of prompts once for all of them.

Activations and whatever the host does count as nothing, and all sequences fit in memory at once. The phases of one
request follow each other by necessity; those of many could overlap, computing prompts while others' tokens are decoded,
which this leaves out: for many requests it is the limit of an engine that does one thing at a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from mmserve.bench.report import Report
from mmserve.bench.workloads import Workload
from mmserve.config import ModelConfig
from mmserve.vision.qwen_vit import QwenVitConfig


@dataclass(frozen=True)
class Ceilings:
    """What a device does at best, by itself: operations of matrix products, and bytes of memory read or written."""

    operations_per_second: float
    bytes_per_second: float


@dataclass(frozen=True)
class Work:
    """One phase."""

    operations: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.operations + other.operations, self.bytes + other.bytes)

    def seconds(self, ceilings: Ceilings) -> float:
        return max(self.operations / ceilings.operations_per_second, self.bytes / ceilings.bytes_per_second)


@dataclass(frozen=True)
class PromptShape:
    """A prompt of `length` tokens, of which the first `num_cached` need not be computed.

    Of those, `num_shared` are also the beginning of an earlier prompt: their keys and values are read for that one.
    """

    length: int
    num_cached: int = 0
    num_shared: int = 0


@dataclass(frozen=True)
class DecoderCost:
    """Operations and bytes of a decoder whose weights and cache have `num_bytes` a value."""

    config: ModelConfig
    num_bytes: int = 2

    @property
    def layer_weights(self) -> int:
        """Weights of the matrices of all layers."""
        config = self.config
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attention = config.hidden_size * (2 * q_size + 2 * kv_size)
        return config.num_layers * (attention + 3 * config.hidden_size * config.intermediate_size)

    @property
    def head_weights(self) -> int:
        return self.config.vocab_size * self.config.hidden_size

    @property
    def cache_bytes(self) -> int:
        """Keys and values of one token."""
        config = self.config
        return 2 * config.num_layers * config.num_kv_heads * config.head_dim * self.num_bytes

    def prompts(self, shapes: Sequence[PromptShape]) -> Work:
        """All prompts together, up to the first token of each."""
        new = sum(shape.length - shape.num_cached for shape in shapes)
        pairs = sum(_triangle(shape.length) - _triangle(shape.num_cached) for shape in shapes)
        num_read = sum(shape.num_cached - shape.num_shared for shape in shapes)
        return Work(
            2 * self.layer_weights * new + 2 * self.head_weights * len(shapes) + self._attention(pairs),
            self._weight_bytes + self.cache_bytes * (new + num_read),
        )

    def decoding_step(self, shapes: Sequence[PromptShape], step: int) -> Work:
        """One more token for each prompt, the `step`-th after the first: it sees `step` keys beside the prompt's."""
        num_pairs = sum(shape.length + step for shape in shapes)
        num_read = num_pairs - sum(shape.num_shared for shape in shapes)
        return Work(
            2 * (self.layer_weights + self.head_weights) * len(shapes) + self._attention(num_pairs),
            self._weight_bytes + self.cache_bytes * num_read,
        )

    @property
    def _weight_bytes(self) -> int:
        return (self.layer_weights + self.head_weights) * self.num_bytes

    def _attention(self, num_pairs: int) -> int:
        """Scores and their sums over `num_pairs` of a query and a key, in all heads and layers."""
        config = self.config
        return 4 * config.num_layers * config.num_heads * config.head_dim * num_pairs


@dataclass(frozen=True)
class QwenTowerCost:
    """Operations and bytes of a Qwen vision tower."""

    config: QwenVitConfig
    num_bytes: int = 2

    def pictures(self, grids: Sequence[tuple[int, int]]) -> Work:
        """Pictures of (rows, columns) patches, all in one batch."""
        num_patches = sum(rows * columns for rows, columns in grids)
        num_tokens = num_patches // self.config.merge**2
        products = self._patch_weights * num_patches + self._merger_weights * num_tokens
        pairs = sum(self._num_pairs(*grid) for grid in grids)
        weights = self._patch_weights + self._merger_weights
        return Work(2 * products + 4 * self.config.hidden_size * pairs, weights * self.num_bytes)

    @property
    def _patch_weights(self) -> int:
        """Weights that every patch is multiplied with: its embedding, and the layers."""
        config = self.config
        hidden = config.hidden_size
        embedding = config.in_channels * config.temporal_patch_size * config.patch_size**2 * hidden
        feed_forward = (3 if config.gated else 2) * hidden * config.intermediate_size
        return embedding + config.depth * (4 * hidden**2 + feed_forward)

    @property
    def _merger_weights(self) -> int:
        """Weights that every merged token is multiplied with, in the last merger and in those of inner layers."""
        merged = self.config.hidden_size * self.config.merge**2
        return (1 + len(self.config.deepstack_layers)) * merged * (merged + self.config.out_hidden_size)

    def _num_pairs(self, rows: int, columns: int) -> int:
        """Pairs of a query and a key in all layers; in windows, only those of the same window."""
        config = self.config
        if config.window is None:
            return config.depth * (rows * columns) ** 2
        side = config.window * config.merge
        in_windows = sum(n**2 for n in _cuts(rows, side)) * sum(n**2 for n in _cuts(columns, side))
        num_full = len(config.full_layers)
        return num_full * (rows * columns) ** 2 + (config.depth - num_full) * in_windows


@dataclass(frozen=True)
class Limit:
    """The least seconds that a workload can take, by phase, and what it has to do in them."""

    vision_seconds: float
    prompt_seconds: float
    decoding_seconds: float
    work: Work
    ceilings: Ceilings

    @property
    def seconds(self) -> float:
        return self.vision_seconds + self.prompt_seconds + self.decoding_seconds

    def __add__(self, other: "Limit") -> "Limit":
        return Limit(
            self.vision_seconds + other.vision_seconds,
            self.prompt_seconds + other.prompt_seconds,
            self.decoding_seconds + other.decoding_seconds,
            self.work + other.work,
            self.ceilings,
        )

    def report(self, measured_seconds: float) -> Report:
        """Ready for JSON; a share of 1 is the limit itself."""
        return {
            "limit_seconds": _rounded(self.seconds),
            "share_of_limit": round(self.seconds / measured_seconds, 4),
            "limit": {
                "vision_seconds": _rounded(self.vision_seconds),
                "prompt_seconds": _rounded(self.prompt_seconds),
                "decoding_seconds": _rounded(self.decoding_seconds),
                "operations": _rounded(self.work.operations),
                "bytes": _rounded(self.work.bytes),
                "operations_per_second": _rounded(self.ceilings.operations_per_second),
                "bytes_per_second": _rounded(self.ceilings.bytes_per_second),
            },
        }


def text_limit(config: ModelConfig, workload: Workload, ceilings: Ceilings, *, num_bytes: int = 2) -> Limit:
    """Of a workload's requests, `workload.width` at a time; a warm prefix counts as cached."""
    num_cached, width = len(workload.warm_prefix), workload.width
    shapes = [
        PromptShape(len(prompt), num_cached, num_shared=num_cached if index % width else 0)
        for index, prompt in enumerate(workload.prompts)
    ]
    cost = DecoderCost(config, num_bytes)
    waves = [shapes[start : start + width] for start in range(0, len(shapes), width)]
    limits = [decoder_limit(cost, wave, workload.max_tokens, ceilings) for wave in waves]
    return sum(limits[1:], start=limits[0])


def decoder_limit(cost: DecoderCost, shapes: Sequence[PromptShape], max_tokens: int, ceilings: Ceilings) -> Limit:
    """Of prompts that run together, each with an answer of `max_tokens`."""
    prompts = cost.prompts(shapes)
    steps = [cost.decoding_step(shapes, step) for step in range(1, max_tokens)]
    return Limit(
        vision_seconds=0.0,
        prompt_seconds=prompts.seconds(ceilings),
        decoding_seconds=sum(step.seconds(ceilings) for step in steps),
        work=sum(steps, start=prompts),
        ceilings=ceilings,
    )


def page_limit(
    config: ModelConfig,
    layouts: Sequence[tuple[int, ...]],
    shapes: Sequence[PromptShape],
    max_tokens: int,
    ceilings: Ceilings,
    *,
    num_bytes: int = 2,
) -> Limit | None:
    """Of pages whose patches lie as (1, rows, columns), each encoded once, and of the prompts about them, all at once.

    Where several prompts are about one page, its tokens are cached and shared in all but the first. None for a vision
    tower that is not Qwen's.
    """
    model_type = str(config.multimodal.get("model_type"))
    if config.vision is None or not model_type.startswith("qwen"):
        return None
    grids = [(rows, columns) for _, rows, columns in layouts]
    tower = QwenTowerCost(QwenVitConfig.from_hf(model_type, config.vision), num_bytes).pictures(grids)
    limit = decoder_limit(DecoderCost(config, num_bytes), shapes, max_tokens, ceilings)
    return Limit(tower.seconds(ceilings), 0.0, 0.0, tower, ceilings) + limit


def parse_ceilings(text: str) -> Ceilings:
    """`789e12,4.27e12` -> operations and bytes a second. Raises `ValueError`."""
    operations, _, num_bytes = text.partition(",")
    ceilings = Ceilings(float(operations), float(num_bytes))
    if not (0 < ceilings.operations_per_second < float("inf") and 0 < ceilings.bytes_per_second < float("inf")):
        raise ValueError("both have to be positive numbers")
    return ceilings


def bytes_of(dtype: str) -> int:
    """Bytes of a value of `bfloat16`, `float32`, ..."""
    kind: torch.dtype = getattr(torch, dtype)
    return kind.itemsize


def _triangle(length: int) -> int:
    """Pairs of a query and the keys that it sees, itself included, in a causal sequence."""
    return length * (length + 1) // 2


def _cuts(length: int, side: int) -> Iterator[int]:
    """`length` in pieces of `side`, the last one shorter."""
    yield from (min(side, length - start) for start in range(0, length, side))


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")
