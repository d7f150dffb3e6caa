"""What is kept of a task over one document: counters, seconds by stage, spans, and fields of the request's log line."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mmserve.pipelines.events import DocumentOpened, Event, OnEvent, PageRead, RequestSubmitted, tell_nobody
from mmserve.server.logs import count, note

if TYPE_CHECKING:
    from mmserve.jobs.counters import JobCounters
    from mmserve.pipelines.tasks import TaskName
    from mmserve.server.tracing import NoTracing

Stage = Literal["opening", "pages", "asking", "total"]
STAGE_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0, 3600.0)


class TaskMetrics:
    """Labels are names of ours alone, so that there are never more than tasks, stages and kinds of pages."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.documents = Counter(
            "mmserve_documents", "Documents worked on, by how it ended.", ["task", "status"], registry=registry
        )
        self.pages = Counter("mmserve_pages", "Pages read, by where text came from.", ["source"], registry=registry)
        self.stages = Histogram(
            "mmserve_stage_seconds",
            "Seconds of a document: until it was opened, of its pages, of its requests, and in all.",
            ["task", "stage"],
            buckets=STAGE_BUCKETS,
            registry=registry,
        )


class JobCollector(Collector):
    """Reads the counters of jobs at every scrape. Their documents and pages are among those of `TaskMetrics`."""

    def __init__(self, counters: "JobCounters") -> None:
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        counters = self._counters
        jobs = CounterMetricFamily("mmserve_jobs", "Jobs that have ended, by how.", labels=["task", "status"])
        for (task, status), number in counters.jobs.copy().items():
            jobs.add_metric([task, status], number)
        yield jobs
        yield GaugeMetricFamily("mmserve_jobs_running", "Jobs that are worked on.", value=counters.num_running)


class TaskObserver:
    """Stands between a task and whoever listens to it:

    with TaskObserver("summarize", metrics, tracing, on_event) as tell:
        result = await summarize(..., on_event=tell)
    """

    def __init__(
        self, task: "TaskName", metrics: TaskMetrics, tracing: "NoTracing", on_event: OnEvent = tell_nobody
    ) -> None:
        self._task = task
        self._metrics = metrics
        self._tracing = tracing
        self._on_event = on_event
        self._num_pages = 0
        self._started = time.monotonic()
        self._opened: float | None = None
        self._asked: float | None = None
        self._stack = ExitStack()

    def _tell(self, event: Event) -> None:
        match event:
            case DocumentOpened():
                self._opened = time.monotonic()
                self._observe("opening", self._opened - self._started)
            case PageRead():
                self._count_page(event)
            case RequestSubmitted():
                self._asked = self._asked or time.monotonic()
            case _:
                pass
        self._on_event(event)

    def __enter__(self) -> OnEvent:
        self._stack.enter_context(self._tracing.task(self._task))
        return self._tell

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        status = "done" if error is None else "cancelled" if isinstance(error, asyncio.CancelledError) else "failed"
        if self._asked is not None:
            self._observe("asking", time.monotonic() - self._asked)
        self._observe("total", time.monotonic() - self._started)
        self._metrics.documents.labels(self._task, status).inc()
        note(task=self._task)
        count(num_documents=1, num_pages=self._num_pages)
        self._stack.__exit__(kind, error, traceback)

    def _count_page(self, event: PageRead) -> None:
        self._num_pages += 1
        self._metrics.pages.labels(event.page.source).inc()
        if event.num_read == event.num_pages and self._opened is not None:
            seconds = time.monotonic() - self._opened
            self._observe("pages", seconds)
            self._tracing.stage("pages", seconds, {"mmserve.num_pages": event.num_pages})

    def _observe(self, stage: Stage, seconds: float) -> None:
        self._metrics.stages.labels(self._task, stage).observe(seconds)
