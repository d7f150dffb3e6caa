"""Prometheus metrics of one app, in a registry of its own."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from mmserve.engine.messages import EngineStats
from mmserve.server.task_metrics import TaskMetrics
from mmserve.vision.preprocess_pool import PreprocessStats

if TYPE_CHECKING:
    from mmserve.engine.client import RequestTimings

FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
INTER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.5)
QUEUE_BUCKETS = (0.001, 0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)

disable_created_metrics()  # type: ignore[no-untyped-call]


class EngineCollector(Collector):
    """Reads the latest statistics of engine and preprocessing at every scrape: no second bookkeeping here."""

    def __init__(
        self,
        stats: Callable[[], EngineStats],
        preprocessing: Callable[[], PreprocessStats | None],
        num_restarts: Callable[[], int],
    ) -> None:
        self._num_restarts = num_restarts
        self._stats = stats
        self._preprocessing = preprocessing

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        yield _gauge("num_requests_running", "Sequences in the current step.", stats.num_requests_running)
        yield _gauge("num_requests_waiting", "Sequences that wait for a place.", stats.num_requests_waiting)
        yield _gauge("kv_cache_usage_ratio", "Used part of the KV blocks, 0 to 1.", stats.kv_cache_usage_ratio)
        yield _counter("prefix_cache_queries", "Tokens looked up in the prefix cache.", stats.prefix_cache_queries)
        yield _counter("prefix_cache_hits", "Tokens found in the prefix cache.", stats.prefix_cache_hits)
        yield _counter("num_preemptions", "Sequences sent back to the queue for want of blocks.", stats.num_preemptions)
        yield _counter("encoder_cache_queries", "Images looked up in the encoder cache.", stats.encoder_cache_queries)
        yield _counter("encoder_cache_hits", "Images found in the encoder cache.", stats.encoder_cache_hits)
        yield _counter("encoder_tokens", "Tokens that the vision encoder computed.", stats.num_encoder_tokens)
        yield _summary("encoder_seconds", "Runs of the encoder.", stats.num_encoder_runs, stats.encoder_seconds)
        yield _counter("engine_restarts", "Times that the engine was started again.", self._num_restarts())
        work = self._preprocessing() or PreprocessStats()
        yield _summary("preprocess_seconds", "Preprocessing of a picture.", work.num_images, work.seconds)


class WaitingCollector(Collector):
    """Counts what waits in the server, by the places it waits for."""

    def __init__(self, engine: Callable[[], int], documents: Callable[[], int]) -> None:
        self._engine = engine
        self._documents = documents

    def collect(self) -> Iterator[Metric]:
        yield _gauge("num_requests_queued", "Requests that have not gone to the engine yet.", self._engine())
        yield _gauge(
            "num_documents_queued", "Documents that wait for their turn; those of jobs apart.", self._documents()
        )


class ServerMetrics:
    """Histograms and counters over finished sequences; `observe` may be called from any thread."""

    def __init__(
        self,
        stats: Callable[[], EngineStats],
        preprocessing: Callable[[], PreprocessStats | None],
        num_restarts: Callable[[], int],
    ) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(stats, preprocessing, num_restarts))
        self.tasks = TaskMetrics(self.registry)
        labels = ["method", "route", "status"]
        self._http_requests = Counter(
            "mmserve_http_requests", "HTTP requests by route and status.", labels, registry=self.registry
        )
        self._http_seconds = Histogram(
            "mmserve_http_request_seconds",
            "From an HTTP request to the end of its answer.",
            ["route"],
            buckets=REQUEST_BUCKETS,
            registry=self.registry,
        )
        self._prompt_tokens = self._new_counter("prompt_tokens", "Prompt tokens of finished requests.")
        self._generation_tokens = self._new_counter("generation_tokens", "Generated tokens of finished requests.")
        self._finished = Counter(
            "mmserve_request_success", "Finished requests by reason.", ["finished_reason"], registry=self.registry
        )
        self._first_token = self._new_histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", FIRST_TOKEN_BUCKETS
        )
        self._inter_token = self._new_histogram(
            "inter_token_latency_seconds", "Between two tokens of a request.", INTER_TOKEN_BUCKETS
        )
        self._queue = self._new_histogram(
            "request_queue_time_seconds", "From arrival to the first step.", QUEUE_BUCKETS
        )
        self._request = self._new_histogram(
            "e2e_request_latency_seconds", "From arrival to the last token.", REQUEST_BUCKETS
        )

    def observe(self, timings: "RequestTimings") -> None:
        self._prompt_tokens.inc(timings.num_prompt_tokens)
        self._generation_tokens.inc(timings.num_output_tokens)
        self._finished.labels(timings.finish_reason).inc()
        self._queue.observe(timings.queue_seconds)
        self._request.observe(timings.e2e_seconds)
        if timings.time_to_first_token is not None:
            self._first_token.observe(timings.time_to_first_token)
        for seconds in timings.inter_token_latencies:
            self._inter_token.observe(seconds)

    def observe_http(self, method: str, route: str, status: int, seconds: float) -> None:
        self._http_requests.labels(method, route, str(status)).inc()
        self._http_seconds.labels(route).observe(seconds)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """The scrape's body, and its media type as the `Accept` header wants it."""
        encoder, media_type = choose_encoder(accept)
        return encoder(self.registry), media_type

    def _new_counter(self, name: str, text: str) -> Counter:
        return Counter(f"mmserve_{name}", text, registry=self.registry)

    def _new_histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"mmserve_{name}", text, buckets=buckets, registry=self.registry)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"mmserve_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"mmserve_{name}", text, value=value)


def _summary(name: str, text: str, count: int, total: float) -> Metric:
    return SummaryMetricFamily(f"mmserve_{name}", text, count_value=count, sum_value=total)
