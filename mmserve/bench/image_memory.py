"""Whether host memory stays flat over thousands of pictures: more of everything than its caches hold."""

import asyncio
import contextlib
import dataclasses
import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from mmserve.bench.memory import private_tree_bytes, process_tree_bytes
from mmserve.bench.report import Report, versions
from mmserve.bench.vision import Asker
from mmserve.config import EngineConfig
from mmserve.engine.client import EngineClient
from mmserve.engine.prompt_factory import open_prompts
from mmserve.errors import RequestError
from mmserve.vision.image_source import PixelLimits

_CONCURRENCY = 8
_MAX_TOKENS = 4
_REPEAT_EVERY = 4
_SHARED_MEMORY = Path("/dev/shm")
# Full long before the first sample, so that a cache that fills is not taken for a leak.
_PATCHES_BYTES = 4 * 1024**2
_ENCODER_CACHE_TOKENS = 256


def run_image_memory(
    config: EngineConfig,
    *,
    num_pictures: int = 2000,
    num_workers: int = 2,
    limits: PixelLimits | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Memory after each tenth of the pictures; each is another one, and a quarter is asked about twice.

    `growth_bytes` is that of the private data from the first tenth to the last.

    The KV cache should be so small that a tenth of the pictures fills it: its memory counts once it was written to.

    Raises `RequestError` for fewer than 10 pictures.
    """
    if num_pictures < 10:
        raise RequestError("invalid_request", "--num-pages must be at least 10 here", param="num_pages")
    scheduler = dataclasses.replace(config.scheduler, encoder_cache_tokens=_ENCODER_CACHE_TOKENS)
    config = dataclasses.replace(config, scheduler=scheduler)
    on_progress(f"Starting {config.names[0]}")
    with tempfile.TemporaryDirectory(prefix="mmserve-bench-") as folder:
        client = EngineClient.start(config)
        prompts = open_prompts(client, num_workers=num_workers, limits=limits, capacity_bytes=_PATCHES_BYTES)
        asker = Asker(client, prompts, Path(folder))
        try:
            client.wait_until_ready()
            samples = asyncio.run(_ask_about_all(asker, _stops(num_pictures), on_progress))
        finally:
            prompts.close()
            client.close()
    return {
        "workload": "memory",
        "model": config.names[0],
        "num_requests": samples[-1]["num_requests"],
        "samples": samples,
        "growth_bytes": samples[-1]["private_bytes"] - samples[0]["private_bytes"],
        "shared_bytes_after_close": shared_bytes(asker.segments),
        "versions": versions(),
    }


def shared_bytes(segments: Iterable[str]) -> int:
    """Of those segments of shared memory that still exist; 0 where the system shows none as files."""
    total = 0
    for name in segments:
        with contextlib.suppress(FileNotFoundError):
            total += (_SHARED_MEMORY / name).stat().st_size
    return total


def picture_order(start: int, stop: int) -> Iterator[int]:
    """Every number once, and some again a little later, when others have come in between."""
    for number in range(start, stop):
        yield number
        if number % _REPEAT_EVERY == 0:
            yield max(number - _REPEAT_EVERY, 0)


def _stops(num_pictures: int) -> tuple[int, ...]:
    """Every tenth of the way."""
    return tuple(num_pictures * tenth // 10 for tenth in range(1, 11))


async def _ask_about_all(asker: Asker, stops: tuple[int, ...], on_progress: Callable[[str], None]) -> list[Report]:
    """A sample whenever as many different pictures are done as a stop says."""
    samples: list[Report] = []
    for start, stop in itertools.pairwise((0, *stops)):
        on_progress(f"{stop} pictures")
        numbers = picture_order(start, stop)
        await asyncio.gather(*(_ask_in_turn(asker, numbers) for _ in range(_CONCURRENCY)))
        samples.append(_sample(asker, stop))
    return samples


async def _ask_in_turn(asker: Asker, numbers: Iterator[int]) -> None:
    for number in numbers:
        with asker.picture(number) as picture:
            await asker.ask(picture, "What is this?", _MAX_TOKENS)


def _sample(asker: Asker, num_pictures: int) -> Report:
    stats, pool = asker.client.stats, asker.prompts.pool
    assert pool is not None
    return {
        "num_pictures": num_pictures,
        "num_requests": asker.num_requests,
        "process_bytes": process_tree_bytes(),
        "private_bytes": private_tree_bytes(),
        "shared_bytes": shared_bytes(asker.segments),
        "num_preprocessed": pool.stats.num_images,
        "num_encoded": stats.encoder_cache_queries - stats.encoder_cache_hits,
        "encoder_cache_hits": stats.encoder_cache_hits,
        "encoder_tokens": stats.num_encoder_tokens,
    }
