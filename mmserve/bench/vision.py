"""Pages through the whole of it: preprocessing, encoder, decoder; many at once, and two questions about one page."""

import asyncio
import dataclasses
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from mmserve.bench.ceilings import measure_ceilings
from mmserve.bench.limits import Ceilings, PromptShape, bytes_of, page_limit
from mmserve.bench.memory import MemoryWatcher
from mmserve.bench.pages import A4_SIZE, draw_picture, make_pages, save_page
from mmserve.bench.report import Measurement, Report, RequestRecord, make_report
from mmserve.bench.workloads import PageForm
from mmserve.config import EngineConfig
from mmserve.engine.client import EngineClient
from mmserve.engine.prompt_builder import PromptBuilder
from mmserve.errors import EngineError, RequestError
from mmserve.request import SamplingParams
from mmserve.vision.decoded_picture import PictureSource
from mmserve.vision.image_source import ImageSource

OpenPrompts = Callable[[EngineClient], PromptBuilder]

SUMMARY = "Summarise this page in five sentences."
QUESTIONS = ("What is the total?", "Who signed it?", "List the dates.", "Which language is it?")
# Pages of no workload: nothing about them is cached when they are asked about first.
_FIRST_LATENCY_PAGE = 5000
_WARM_UP_PAGE = 6000
_NUM_WARM_UP_PICTURES = 4


@dataclass(frozen=True)
class PageWorkload:
    """Every question about every page, all offered at once; greedy, `max_tokens` each, the end of sequence ignored."""

    name: str
    first_page: int
    num_pages: int
    questions: tuple[str, ...]
    max_tokens: int
    page_size: tuple[int, int] = A4_SIZE

    @property
    def page_numbers(self) -> range:
        return range(self.first_page, self.first_page + self.num_pages)


PAGE_WORKLOADS = {
    "D1": PageWorkload("D1", 0, 96, (SUMMARY,), 128),
    "D2": PageWorkload("D2", 700, 16, QUESTIONS, 64),
}


def build_page_workload(name: str, num_pages: int | None = None, max_tokens: int | None = None) -> PageWorkload:
    """Raises `RequestError` (`invalid_request`) that names the workloads there are."""
    if name not in PAGE_WORKLOADS:
        known = ", ".join(PAGE_WORKLOADS)
        raise RequestError("invalid_request", f"there is no workload {name!r} of pages: take one of {known}")
    kind = PAGE_WORKLOADS[name]
    return dataclasses.replace(kind, num_pages=num_pages or kind.num_pages, max_tokens=max_tokens or kind.max_tokens)


def run_vision(
    config: EngineConfig,
    workload: PageWorkload,
    open_prompts: OpenPrompts,
    *,
    form: PageForm = "pixels",
    rounds: int = 3,
    ceilings: Ceilings | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """The figures of a workload on a fresh engine; before it, two questions about each of `rounds` further pages, one
    after the other. Pages are offered as `form` says.

    With the share of the device's limit (see `limits`) where its `ceilings` are given, or can be measured on a GPU.

    Raises what `EngineClient` raises, `RequestError` (`images_not_supported`) for a model that reads text only.
    """
    on_progress(f"Starting {config.names[0]}")
    with tempfile.TemporaryDirectory(prefix="mmserve-bench-") as folder, MemoryWatcher() as memory:
        started = time.perf_counter()
        client = EngineClient.start(config)
        prompts = open_prompts(client)
        try:
            client.wait_until_ready()
            start_seconds = time.perf_counter() - started
            asker = Asker(client, prompts, Path(folder))
            records, figures = asyncio.run(_measure(asker, workload, form, rounds, on_progress))
        finally:
            prompts.close()
            client.close()
    info = client.engine_info
    assert info is not None
    threads = config.num_threads or torch.get_num_threads()
    measured = Measurement(
        records, memory.peak_bytes, info.device, info.dtype, threads, start_seconds, client.model_config
    )
    if ceilings is None and info.device.startswith("cuda"):
        on_progress("Measuring what the device allows")
        ceilings = measure_ceilings(info.device)
    return {
        **_speed_report(config, workload, measured),
        "source": form,
        **figures,
        **_limit_report(asker, workload, measured, ceilings),
    }


class Asker:
    """Asks one engine about pages, which it writes to `folder`. `segments` are those of the patches that it had."""

    def __init__(self, client: EngineClient, prompts: PromptBuilder, folder: Path) -> None:
        self.client = client
        self.prompts = prompts
        self.num_requests = 0
        self.segments: set[str] = set()
        self._serial_numbers = itertools.count()
        self._folder = folder

    def pages(self, numbers: Sequence[int], size: tuple[int, int], form: PageForm) -> list[PictureSource]:
        return make_pages(numbers, size, form, self._folder)

    @contextmanager
    def picture(self, number: int) -> Iterator[ImageSource]:
        """A small one, in a file of its own for as long as the block lasts."""
        path = self._folder / f"picture-{number}-{next(self._serial_numbers)}.png"
        try:
            yield save_page(draw_picture(number), path)
        finally:
            path.unlink()

    async def ask(self, source: PictureSource, question: str, max_tokens: int) -> RequestRecord:
        """The clock starts before the page is read. Raises `EngineError` for an answer that is cut short."""
        parts = [{"type": "image", "source": source}, {"type": "text", "text": question}]
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        token_times: list[float] = []
        offered = time.perf_counter()
        async with self.prompts.build([{"role": "user", "content": parts}], max_tokens=self._room(max_tokens)) as built:
            self.segments.update(image.patches.segment for image in built.images if image.patches)
            stream = self.client.generate(built.token_ids, params, images=built.images)
            async with aclosing(stream) as deltas:
                async for delta in deltas:
                    token_times += [time.perf_counter()] * len(delta.token_ids)
        if len(token_times) != max_tokens:
            raise EngineError(
                "internal_error", f"an answer has {len(token_times)} of {max_tokens} tokens: its figures mean nothing"
            )
        self.num_requests += 1
        return RequestRecord(offered, token_times[0], token_times[-1], len(built.token_ids), max_tokens)

    async def warm_up(self) -> None:
        """Every worker process starts, and what is lazy is done."""
        with ExitStack() as stack:
            pictures = [stack.enter_context(self.picture(number)) for number in range(_NUM_WARM_UP_PICTURES)]
            await asyncio.gather(*(self.ask(picture, "Hello", 2) for picture in pictures))

    def _room(self, max_tokens: int) -> int:
        return self.client.max_model_len - max_tokens


@dataclass(frozen=True)
class Counters:
    """Running totals of an engine and its preprocessing."""

    encoder_cache_queries: int
    encoder_cache_hits: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    preprocess_seconds: float
    encoder_seconds: float

    @classmethod
    def read(cls, asker: Asker) -> "Counters":
        stats, pool = asker.client.stats, asker.prompts.pool
        assert pool is not None
        return cls(
            stats.encoder_cache_queries,
            stats.encoder_cache_hits,
            stats.prefix_cache_queries,
            stats.prefix_cache_hits,
            pool.stats.seconds,
            stats.encoder_seconds,
        )

    def seconds_since(self, earlier: "Counters") -> tuple[float, float]:
        """Of preprocessing outside the engine, and of the encoder."""
        return self.preprocess_seconds - earlier.preprocess_seconds, self.encoder_seconds - earlier.encoder_seconds

    def since(self, earlier: "Counters") -> Report:
        """What came to it, ready for JSON."""
        gains = {name: round(value - getattr(earlier, name), 3) for name, value in dataclasses.asdict(self).items()}
        return {
            "encoder_cache": {kind: gains[f"encoder_cache_{kind}"] for kind in ("queries", "hits")},
            "prefix_cache": {kind: gains[f"prefix_cache_{kind}"] for kind in ("queries", "hits")},
            "preprocess_seconds": gains["preprocess_seconds"],
            "encoder_seconds": gains["encoder_seconds"],
        }


@dataclass(frozen=True)
class PageAlone:
    """Two questions about one page, on an engine that does nothing else; the seconds are all the first one's."""

    first: RequestRecord
    second: RequestRecord
    preprocess_seconds: float
    encoder_seconds: float


async def _measure(
    asker: Asker, workload: PageWorkload, form: PageForm, rounds: int, on_progress: Callable[[str], None]
) -> tuple[list[RequestRecord], Report]:
    """One record a request, page by page, and what else there is to tell."""
    await asker.warm_up()
    (page,) = asker.pages([_WARM_UP_PAGE], workload.page_size, form)
    await asker.ask(page, SUMMARY, 1)
    on_progress("Two questions about one page")
    numbers = range(_FIRST_LATENCY_PAGE, _FIRST_LATENCY_PAGE + rounds)
    alone = [await _ask_twice(asker, page) for page in asker.pages(numbers, workload.page_size, form)]
    on_progress(f"{workload.name}: drawing {workload.num_pages} pages")
    pages = asker.pages(workload.page_numbers, workload.page_size, form)
    before = Counters.read(asker)
    on_progress(f"{workload.name}: {workload.num_pages} pages, {len(workload.questions)} questions each")
    records = await asyncio.gather(
        *(
            asker.ask(page, question, workload.max_tokens)
            for page, question in itertools.product(pages, workload.questions)
        )
    )
    gained = Counters.read(asker).since(before)
    return records, {**gained, "page_alone": _alone_report(alone), "same_page": _same_page_report(alone)}


async def _ask_twice(asker: Asker, page: PictureSource) -> PageAlone:
    before = Counters.read(asker)
    first, second = [await asker.ask(page, question, 1) for question in QUESTIONS[:2]]
    # A GPU's seconds are counted by the step after, and the second question adds none.
    return PageAlone(first, second, *Counters.read(asker).seconds_since(before))


def _alone_report(pages: Sequence[PageAlone]) -> Report:
    """Medians over the pages, of the first question about each."""

    def milliseconds(values: Iterable[float]) -> float:
        return round(statistics.median(values) * 1000, 2)

    return {
        "num_pages": len(pages),
        "prompt_tokens": pages[0].first.num_prompt_tokens,
        "ttft_ms": milliseconds(page.first.time_to_first_token for page in pages),
        "preprocess_ms": milliseconds(page.preprocess_seconds for page in pages),
        "encoder_ms": milliseconds(page.encoder_seconds for page in pages),
    }


def _same_page_report(pages: Sequence[PageAlone]) -> Report:
    """Medians over the pages."""
    first = [page.first.time_to_first_token for page in pages]
    second = [page.second.time_to_first_token for page in pages]
    return {
        "prompt_tokens": pages[0].first.num_prompt_tokens,
        "ttft_ms": {
            "first_question": round(statistics.median(first) * 1000, 2),
            "second_question": round(statistics.median(second) * 1000, 2),
        },
        "second_to_first": round(statistics.median(b / a for a, b in zip(first, second, strict=True)), 4),
    }


def _speed_report(config: EngineConfig, workload: PageWorkload, measured: Measurement) -> Report:
    return {
        "pages_per_second": round(workload.num_pages / measured.seconds, 4),
        **make_report(measured, workload=workload.name, model=config.names[0]),
        "num_pages": workload.num_pages,
        "num_requests": len(measured.records),
        "max_tokens": workload.max_tokens,
    }


def _limit_report(asker: Asker, workload: PageWorkload, measured: Measurement, ceilings: Ceilings | None) -> Report:
    processor, model = asker.client.image_processor, measured.model
    if ceilings is None or processor is None or model is None:
        return {}
    plan = processor.plan(*workload.page_size, asker.prompts.limits)
    # Of further questions about a page, the page is known.
    known = [plan.num_tokens if index % len(workload.questions) else 0 for index in range(len(measured.records))]
    pairs = zip(measured.records, known, strict=True)
    shapes = [PromptShape(record.num_prompt_tokens, num_known, num_known) for record, num_known in pairs]
    layouts = [plan.items[0].layout] * workload.num_pages
    num_bytes = bytes_of(measured.dtype)
    limit = page_limit(model, layouts, shapes, workload.max_tokens, ceilings, num_bytes=num_bytes)
    return {} if limit is None else limit.report(measured.seconds)
