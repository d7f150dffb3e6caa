"""The application: routes, limits, error handling and metrics around one engine and one page reader."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI, Security
from fastapi.security import APIKeyHeader, HTTPBearer
from starlette.middleware.cors import CORSMiddleware

import mmserve
from mmserve.engine.prompt_builder import PromptBuilder
from mmserve.pipelines.tasks import TASKS
from mmserve.server.access import RequireKey
from mmserve.server.browsers import BrowserGuard, SecurityHeaders
from mmserve.server.docs_page import DOCS_PATHS
from mmserve.server.docs_page import router as docs_router
from mmserve.server.errors import install_error_handlers
from mmserve.server.limits import BodyLimit, RefuseWhenFull
from mmserve.server.observation import Observation
from mmserve.server.openapi import install_openapi
from mmserve.server.rate_limit import RateLimit
from mmserve.server.request_id import RequestIds
from mmserve.server.routers import chat, completions, files, health, jobs, models, page, tasks
from mmserve.server.schemas.common import ACCESS_RESPONSES
from mmserve.server.settings import AccessSettings, ServerSettings
from mmserve.server.state import ServedEngine, ServerState
from mmserve.server.tracing import NoTracing, open_tracing

if TYPE_CHECKING:
    from mmserve.vision.pages import PageReader

TASK_PATHS = tuple(f"/v1/{task}" for task in TASKS)
UPLOAD_PATHS = (*TASK_PATHS, "/v1/files", "/v1/jobs")
COMPLETION_PATHS = ("/v1/chat/completions", "/v1/completions")


def create_app(
    client: ServedEngine,
    reader: "PageReader",
    settings: ServerSettings,
    prompts: PromptBuilder | None = None,
    tracing: NoTracing | None = None,
) -> FastAPI:
    """An app that serves `client`, which may still be starting. Who made its arguments closes them, not the app.

    Without `prompts` the app takes no pictures. Who serves the app enters the `jobs` of its state before, and leaves
    them after: `DrainingServer` does. Traces go where `settings` say, or to `tracing`; they end with the app.
    """
    tracing = tracing or open_tracing(settings.otlp_traces_endpoint)
    state = ServerState(client, reader, prompts or PromptBuilder(client.tokenizer), settings, tracing)
    app = FastAPI(
        title="mmserve",
        version=mmserve.__version__,
        description="Documents in, answers with page citations out; chat and completions as OpenAI's.",
        lifespan=_lifespan,
        docs_url=None,
        redoc_url=None,
        responses=ACCESS_RESPONSES,
        # These say to the schema how a key is sent; `RequireKey` looks at it.
        dependencies=[
            Security(HTTPBearer(auto_error=False)),
            Security(APIKeyHeader(name="X-Api-Key", auto_error=False)),
        ],
    )
    app.state.server = state
    for routes in (tasks, files, jobs, chat, completions, models, health, page):
        app.include_router(routes.router)
    app.include_router(docs_router)
    page.mount_static(app)
    _add_middleware(app, state)
    install_openapi(app)
    return app


def _add_middleware(app: FastAPI, state: ServerState) -> None:
    """From the innermost outwards: is there room, who may ask how often, how much, what all carry, what is kept."""
    settings = state.settings
    access = settings.access
    gates = {**dict.fromkeys(COMPLETION_PATHS, state.gate), **dict.fromkeys(TASK_PATHS, state.document_gate)}
    app.add_middleware(RefuseWhenFull, gates=gates)
    if access.rate_limit is not None:
        app.add_middleware(RateLimit, rate=access.rate_limit)
    app.add_middleware(RequireKey, keys=access.keys, open_paths=_open_paths(access))
    if access.keys is None:
        app.add_middleware(BrowserGuard, hosts=access.allowed_hosts, origins=access.cors_origins)
    app.add_middleware(
        BodyLimit,
        default=settings.max_json_bytes,
        limits=dict.fromkeys(UPLOAD_PATHS, settings.max_upload_bytes),
        timeout=settings.upload_timeout,
    )
    install_error_handlers(app)
    if access.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=access.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["Authorization", "Idempotency-Key", "Last-Event-ID", "X-Api-Key", "X-Request-Id"],
            expose_headers=["Retry-After", "RateLimit-Limit", "RateLimit-Remaining", "RateLimit-Reset", "X-Request-Id"],
        )
    app.add_middleware(SecurityHeaders)
    app.add_middleware(Observation, metrics=state.metrics, tracing=state.tracing)
    app.add_middleware(RequestIds)


def _open_paths(access: AccessSettings) -> tuple[str, ...]:
    metrics = ("/metrics",) if access.open_metrics else ()
    return metrics + (DOCS_PATHS if access.open_docs else ())


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    state: ServerState = app.state.server
    observers = (state.metrics.observe, state.tracing.observe)
    state.engine.observers.extend(observers)
    try:
        yield
    finally:
        for observer in observers:
            state.engine.observers.remove(observer)
        await asyncio.to_thread(state.tracing.close)
