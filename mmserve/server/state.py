"""What all routes of one app share, and the checks that come before a route's own work."""

import hashlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Protocol

from fastapi import Depends, Request

import mmserve
from mmserve.config import EngineConfig
from mmserve.engine.messages import EngineStats
from mmserve.errors import EngineError, RequestError
from mmserve.jobs.outbound import parse_allowed_hosts
from mmserve.jobs.service import JobService
from mmserve.request import ImageSpan, SamplingParams
from mmserve.server.lifetime import Drain
from mmserve.server.limits import AdmissionGate
from mmserve.server.media_fetch import MediaFetcher
from mmserve.server.metrics import ServerMetrics, WaitingCollector
from mmserve.server.owners import FairSlots, OwnerEngine, cache_salt_of, owner_of
from mmserve.server.settings import ServerSettings
from mmserve.server.task_metrics import JobCollector, TaskObserver
from mmserve.server.tracing import NoTracing

if TYPE_CHECKING:
    from mmserve.engine.client import CompletionDelta, RequestTimings
    from mmserve.engine.prompt_builder import PromptBuilder
    from mmserve.pipelines.events import OnEvent
    from mmserve.pipelines.tasks import TaskName
    from mmserve.vision.pages import PageReader
    from mmserve.weights.tokenizer import Tokenizer


class ServedEngine(Protocol):
    """What the server needs of an `EngineClient`; a scripted engine in tests has the same."""

    config: EngineConfig
    tokenizer: "Tokenizer"
    max_model_len: int
    stats: EngineStats
    num_restarts: int
    observers: "list[Callable[[RequestTimings], None]]"

    @property
    def state(self) -> Literal["starting", "ready", "dead"]: ...

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        images: Sequence[ImageSpan] = (),
        cache_salt: bytes = b"",
    ) -> "AsyncGenerator[CompletionDelta, None]": ...


class ServerState:
    """One app's engine, page reader, prompt builder, settings, limits and metrics."""

    def __init__(
        self,
        engine: ServedEngine,
        reader: "PageReader",
        prompts: "PromptBuilder",
        settings: ServerSettings,
        tracing: NoTracing,
    ) -> None:
        self.engine = engine
        self.reader = reader
        self.prompts = prompts
        self.settings = settings
        self.fetcher = MediaFetcher(parse_allowed_hosts(settings.allowed_media_hosts), settings.max_media_bytes)
        self.drain = Drain()
        self.tracing = tracing
        self.metrics = ServerMetrics(
            lambda: engine.stats,
            lambda: None if prompts.pool is None else prompts.pool.stats,
            lambda: engine.num_restarts,
        )
        self.document_slots = FairSlots(settings.max_concurrent_documents, wait_seconds=settings.queue_timeout)
        self.jobs = JobService(settings.jobs, self)
        self._weights_changed_at = _changed_at(Path(engine.config.model))
        self.metrics.registry.register(JobCollector(self.jobs.counters))
        self.started_at = int(time.time())
        scheduler = engine.config.scheduler
        self.gate = AdmissionGate(
            max_in_flight=scheduler.max_num_seqs + scheduler.max_num_waiting,
            max_waiting=scheduler.max_num_waiting,
            num_waiting=lambda: engine.stats.num_requests_waiting,
            has_owners=settings.access.keys is not None,
        )
        # Documents that wait for their turn take no place from requests that could go to the engine at once.
        self.document_gate = AdmissionGate(
            max_in_flight=settings.max_concurrent_documents + scheduler.max_num_waiting,
            max_waiting=scheduler.max_num_waiting,
            num_waiting=int,
            has_owners=settings.access.keys is not None,
        )
        # As many again as run, so that the engine always finds the next ones; fewer than it would refuse, so that what
        # was admitted here, a document with its many requests among it, waits for its turn and is not sent away later.
        num_places = scheduler.max_num_seqs + min(scheduler.max_num_seqs, scheduler.max_num_waiting)
        self._engine_places = FairSlots(num_places)
        self.metrics.registry.register(
            WaitingCollector(lambda: self._engine_places.num_waiting, lambda: self.document_slots.num_waiting)
        )

    def engine_for(self, owner: str, cache_salt: str | None = None) -> OwnerEngine:
        """The engine as this owner's requests go to it; `cache_salt` keeps some of them apart from the others."""
        salt = self._salt(owner, cache_salt)
        return OwnerEngine(self.engine, owner, cache_salt=salt, places=self._engine_places)

    def prompts_for(self, owner: str, cache_salt: str | None = None) -> "PromptBuilder":
        """What builds prompts for `engine_for` of the same arguments."""
        salt = self._salt(owner, cache_salt)
        return self.prompts.salted(salt) if salt else self.prompts

    def _salt(self, owner: str, cache_salt: str | None) -> bytes:
        return cache_salt_of(owner, cache_salt, is_shared=self.settings.access.share_caches)

    @property
    def model(self) -> str:
        """All that may change an answer besides the document and the options of its task."""
        config = self.engine.config
        weights = (config.load_format, self.engine.max_model_len, self._weights_changed_at)
        reading = (self.reader.options, self.reader.limits, self.prompts.limits)
        return f"{self.system_fingerprint}|{weights!r}|{reading!r}"

    def watched(self, task: "TaskName", on_event: "OnEvent") -> TaskObserver:
        """To be entered around a task, which tells what it gets; metrics, traces and the log line hear of it."""
        return TaskObserver(task, self.metrics.tasks, self.tracing, on_event)

    @property
    def model_names(self) -> tuple[str, ...]:
        return self.engine.config.names

    @property
    def system_fingerprint(self) -> str:
        """Changes with whatever may change the answer to the same seed."""
        config = self.engine.config
        identity = f"{mmserve.__version__}|{config.model}|{config.dtype}|{config.device}"
        return "fp_" + hashlib.sha256(identity.encode()).hexdigest()[:10]

    def model_name(self, asked: str | None) -> str:
        """The name to answer with; raises `RequestError` (`model_not_found`) for a model that is not served."""
        if asked and asked not in self.model_names:
            served = ", ".join(self.model_names)
            raise RequestError(
                "model_not_found", f"The model {asked!r} is not served here; this server has {served}.", param="model"
            )
        return asked or self.model_names[0]

    @property
    def is_ready(self) -> bool:
        """Whether work can be begun: the model is loaded, and the server stays."""
        return self.engine.state == "ready" and not self.drain.has_begun

    def require_running(self) -> None:
        if self.drain.has_begun:
            raise EngineError("shutting_down", "The server is shutting down and takes no new requests.")

    def require_ready(self) -> None:
        self.require_running()
        if self.engine.state == "dead":
            raise EngineError("engine_dead", "The engine has stopped; the server has to be started again.")
        if self.engine.state == "starting":
            what = (
                "The engine ended, and is being started again" if self.engine.num_restarts else "The model is loading"
            )
            raise EngineError("engine_not_ready", f"{what}. Try again in a few seconds.")


def _changed_at(model: Path) -> int:
    """When the newest file of a checkpoint on this machine was written, in nanoseconds; 0 for a name on a hub."""
    files = model.iterdir() if model.is_dir() else [model] if model.is_file() else []
    return max((file.stat().st_mtime_ns for file in files), default=0)


async def get_state(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


State = Annotated[ServerState, Depends(get_state)]


async def get_owner(request: Request) -> str:
    """Whose request it is: what one owner has sent or asked, no other one can see."""
    return owner_of(request.scope)


Owner = Annotated[str, Depends(get_owner)]


async def require_ready(state: State) -> None:
    state.require_ready()


async def require_running(state: State) -> None:
    """For what needs no model."""
    state.require_running()
