"""The two servers to which `fuzz_uploads` sends documents: one that reads them, one that is shown their pictures.

The page workers and preprocess workers are real; the engine that answers about text is a script, the one that is shown
pictures has a tiny random model.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from live_server import serving
from scripted_engine import ScriptedEngine
from vision_checkpoint import save_vision_model

from mmserve.config import CacheConfig, EngineConfig, SchedulerConfig
from mmserve.engine.client import EngineClient
from mmserve.engine.prompt_builder import PromptBuilder
from mmserve.vision.page_types import OcrName, PageLimits, PageOptions
from mmserve.vision.pages import PageReader
from mmserve.vision.preprocess_pool import PreprocessPool

_MIB = 1024**2


class ForgetfulEngine(ScriptedEngine):
    """One that does not remember what it was asked, so that the server's memory is the server's."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name in ("prompts", "params", "images", "salts", "started", "finished", "aborted"):
            setattr(self, name, _Nothing())


class _Nothing(list[Any]):
    def append(self, item: object) -> None:
        pass


@dataclass(frozen=True)
class Targets:
    """Where documents go: to be summarised as text, and to be shown to a model as pictures."""

    text_url: str
    vision_url: str


@contextmanager
def targets(*, ocr: OcrName, num_workers: int, page_timeout: float) -> Iterator[Targets]:
    """Two servers that share their page workers. Caches are small, so that they are soon full."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fuzz-")))
        limits = PageLimits(page_timeout=page_timeout)
        reader = PageReader(limits=limits, options=PageOptions(ocr=ocr), num_workers=num_workers)
        stack.callback(reader.close)
        config = EngineConfig(
            model=str(save_vision_model(folder)),
            num_threads=1,
            cache=CacheConfig(memory_bytes=8 * _MIB),
            scheduler=SchedulerConfig(encoder_cache_tokens=8192),
        )
        client = EngineClient.start(config)
        stack.callback(client.close)
        client.wait_until_ready()
        assert client.image_processor is not None
        pool = PreprocessPool(
            client.image_processor, num_workers=1, limits=limits, settle=client.settle, capacity_bytes=8 * _MIB
        )
        prompts = PromptBuilder(client.tokenizer, client.image_processor, pool)
        stack.callback(prompts.close)
        scripted = ForgetfulEngine(answer="The total is 1,284.50 EUR.", max_model_len=30_000)
        text = stack.enter_context(serving(scripted, reader=reader))
        vision = stack.enter_context(serving(client, reader=reader, prompts=prompts))
        yield Targets(text.url, vision.url)


def main(ocr: OcrName, num_workers: str, page_timeout: str) -> None:
    """Serves until standard input ends; the addresses are the only line of standard output."""
    with targets(ocr=ocr, num_workers=int(num_workers), page_timeout=float(page_timeout)) as where:
        print(json.dumps(asdict(where)), flush=True)
        sys.stdin.read()
