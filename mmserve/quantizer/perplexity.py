"""How well a model predicts texts: perplexity over windows that overlap, so that most tokens have a long context."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import torch

from mmserve.cache.encoder_cache import EncoderCache
from mmserve.config import CacheConfig, EngineConfig, SchedulerConfig
from mmserve.engine.model_runner import ModelRunner
from mmserve.errors import RequestError
from mmserve.weights.checkpoint import Checkpoint
from mmserve.weights.tokenizer import Tokenizer


class PromptScorer(Protocol):
    def prompt_logprobs(self, token_ids: list[int], first: int) -> torch.Tensor: ...


@dataclass(frozen=True)
class Perplexity:
    """`num_tokens` are those that were predicted, `num_bytes` their length as text; a loss is in nats a token."""

    num_tokens: int
    num_bytes: int
    loss: float
    perplexity: float
    bits_per_byte: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Window:
    """Tokens `start` to `end`, of which those from `first` on have not been predicted before."""

    start: int
    first: int
    end: int


def windows(num_tokens: int, size: int, stride: int) -> Iterator[Window]:
    """Every token but the first is predicted once; after the first window each has `size - stride` before it."""
    first, end = 1, min(size, num_tokens)
    while first < end:
        yield Window(max(end - size, 0), first, end)
        first, end = end, min(end + stride, num_tokens)


def measure(texts: Sequence[str], tokenizer: Tokenizer, scorer: PromptScorer, *, size: int, stride: int) -> Perplexity:
    """Each text by itself. Raises `RequestError` for texts with nothing to predict, or a stride beyond the window."""
    if not 1 <= stride < size:
        raise RequestError("invalid_request", "--stride must be at least 1 and less than --window", param="stride")
    total, num_tokens, num_bytes = 0.0, 0, 0
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=True, parse_special=False)
        for window in windows(len(ids), size, stride):
            logprobs = scorer.prompt_logprobs(ids[window.start : window.end], window.first - window.start)
            total -= float(logprobs.double().sum())
            num_tokens += window.end - window.first
            num_bytes += sum(len(tokenizer.token_bytes(i)) for i in ids[window.first : window.end])
    if num_tokens == 0:
        raise RequestError("invalid_request", "there is too little text: at least two tokens are needed", param="files")
    loss = total / num_tokens
    # A model that is broken may be further off than a float can say.
    perplexity = math.exp(loss) if loss < 700 else math.inf
    return Perplexity(num_tokens, num_bytes, loss, perplexity, total / math.log(2) / max(num_bytes, 1))


def open_runner(config: EngineConfig, checkpoint: Checkpoint, *, window: int) -> ModelRunner:
    """The engine's own, for one prompt of `window` tokens at a time: what is measured is what will serve."""
    config = replace(
        config,
        max_model_len=window,
        enforce_eager=True,
        cache=CacheConfig(enable_prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=window),
    )
    return ModelRunner(config, checkpoint, EncoderCache(config.scheduler.encoder_cache_tokens))
