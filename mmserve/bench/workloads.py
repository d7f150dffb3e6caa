"""What is measured: prompts that are the same ids for every engine and every version, made from fixed seeds."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from mmserve.errors import RequestError

Prompt = tuple[int, ...]
# How pages are offered: as decoded pictures, as PNG files, or as one PDF with a picture a page.
PageForm = Literal["pixels", "png", "pdf"]


@dataclass(frozen=True)
class Workload:
    """Prompts with `max_tokens` of greedy output each, the end of sequence ignored.

    All are offered at once, or `concurrency` at a time. `warm_prefix` is computed before the clock starts.
    """

    name: str
    prompts: tuple[Prompt, ...]
    max_tokens: int
    concurrency: int | None = None
    warm_prefix: Prompt = ()

    @property
    def width(self) -> int:
        """How many of its requests there can be at once."""
        return min(self.concurrency or len(self.prompts), len(self.prompts))


@dataclass(frozen=True)
class WorkloadKind:
    """How a workload of any number of prompts is made; fewer prompts are the first of more."""

    summary: str
    num_prompts: int
    build: Callable[[str, int], Workload]


def text_prompts(num_prompts: int, length: int, *, last_id: int = 30000, seed: int = 0) -> tuple[Prompt, ...]:
    """Prompts of one length, of ids from 1000 up to but without `last_id`."""
    rng = random.Random(seed)
    return tuple(_prompt(rng, length, last_id) for _ in range(num_prompts))


def _prompt(rng: random.Random, length: int, last_id: int) -> Prompt:
    return tuple(rng.randrange(1000, last_id) for _ in range(length))


def _batch(name: str, num_prompts: int) -> Workload:
    return Workload(name, text_prompts(num_prompts, 256, last_id=40000), max_tokens=64)


def _single(name: str, num_prompts: int) -> Workload:
    return Workload(name, _batch(name, num_prompts).prompts, max_tokens=64, concurrency=1)


def _text(name: str, num_prompts: int) -> Workload:
    return Workload(name, text_prompts(num_prompts, 256), max_tokens=128)


def _single_text(name: str, num_prompts: int) -> Workload:
    return Workload(name, _text(name, num_prompts).prompts, max_tokens=128, concurrency=1)


def _mixed(name: str, num_prompts: int) -> Workload:
    rng = random.Random(1)
    prompts = tuple(_prompt(rng, rng.randint(10, 200), last_id=30000) for _ in range(num_prompts))
    return Workload(name, prompts, max_tokens=128)


def _shared_prefix(name: str, num_prompts: int) -> Workload:
    prefix = text_prompts(1, 2048, seed=3)[0]
    prompts = tuple(prefix + rest for rest in text_prompts(num_prompts, 64, seed=4))
    return Workload(name, prompts, max_tokens=64, warm_prefix=prefix)


WORKLOADS = {
    "C1": WorkloadKind("16 prompts of 256 tokens at once, 64 tokens out (for a CPU)", 16, _batch),
    "single": WorkloadKind("the first prompts of C1, one after the other", 4, _single),
    "T1": WorkloadKind("256 prompts of 256 tokens at once, 128 tokens out", 256, _text),
    "T1-single": WorkloadKind("the first prompts of T1, one after the other", 4, _single_text),
    "T3": WorkloadKind("200 prompts of 10 to 200 tokens at once, 128 tokens out", 200, _mixed),
    "T4": WorkloadKind("256 prompts of one cached prefix of 2048 and 64 more, 64 tokens out", 256, _shared_prefix),
}


def build_workload(name: str, num_prompts: int | None = None) -> Workload:
    """Raises `RequestError` (`invalid_request`) that names the workloads there are."""
    if name not in WORKLOADS:
        raise RequestError("invalid_request", f"there is no workload {name!r}: take one of {', '.join(WORKLOADS)}")
    kind = WORKLOADS[name]
    return kind.build(name, kind.num_prompts if num_prompts is None else num_prompts)
