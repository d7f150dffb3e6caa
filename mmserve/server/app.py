"""The application: routes, limits, error handling and metrics around one engine and one page reader."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI

import mmserve
from mmserve.engine.prompt_builder import PromptBuilder
from mmserve.server.errors import install_error_handlers
from mmserve.server.limits import BodyLimit
from mmserve.server.observation import Observation
from mmserve.server.request_id import RequestIds
from mmserve.server.routers import chat, completions, health, models, summarize
from mmserve.server.settings import ServerSettings
from mmserve.server.state import ServedEngine, ServerState
from mmserve.server.tracing import NoTracing, open_tracing

if TYPE_CHECKING:
    from mmserve.vision.pages import PageReader

UPLOAD_PATHS = ("/v1/summarize",)


def create_app(
    client: ServedEngine,
    reader: "PageReader",
    settings: ServerSettings,
    prompts: PromptBuilder | None = None,
    tracing: NoTracing | None = None,
) -> FastAPI:
    """An app that serves `client`, which may still be starting. Who made its arguments closes them, not the app.

    Without `prompts` the app takes no pictures. Traces go where `settings` say, or to `tracing`; they end with the app.
    """
    tracing = tracing or open_tracing(settings.otlp_traces_endpoint)
    state = ServerState(client, reader, prompts or PromptBuilder(client.tokenizer), settings, tracing)
    app = FastAPI(
        title="mmserve",
        version=mmserve.__version__,
        description="Documents in, answers with page citations out; chat and completions as OpenAI's.",
        lifespan=_lifespan,
    )
    app.state.server = state
    for router in (summarize.router, chat.router, completions.router, models.router, health.router):
        app.include_router(router)
    app.add_middleware(
        BodyLimit,
        default=settings.max_json_bytes,
        limits=dict.fromkeys(UPLOAD_PATHS, settings.max_upload_bytes),
    )
    install_error_handlers(app)
    app.add_middleware(Observation, metrics=state.metrics, tracing=tracing)
    app.add_middleware(RequestIds)
    return app


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
