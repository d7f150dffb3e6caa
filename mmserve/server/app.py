"""The application: routes, limits, error handling and metrics around one engine and one page reader."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI

import mmserve
from mmserve.engine.prompt_builder import PromptBuilder
from mmserve.errors import MMServeError
from mmserve.pipelines.tasks import TASKS
from mmserve.server.errors import install_error_handlers
from mmserve.server.limits import BodyLimit
from mmserve.server.openapi import install_openapi
from mmserve.server.routers import chat, completions, files, health, jobs, models, tasks
from mmserve.server.settings import ServerSettings
from mmserve.server.state import ServedEngine, ServerState

if TYPE_CHECKING:
    from mmserve.vision.pages import PageReader

UPLOAD_PATHS = (*(f"/v1/{task}" for task in TASKS), "/v1/files", "/v1/jobs")


def create_app(
    client: ServedEngine, reader: "PageReader", settings: ServerSettings, prompts: PromptBuilder | None = None
) -> FastAPI:
    """An app that serves `client`, which may still be starting. Who made its arguments closes them, not the app.

    Without `prompts` the app takes no pictures. Jobs are worked on from the app's start to its end; what goes wrong
    with their database at the start is in `startup_error` of its state.
    """
    state = ServerState(client, reader, prompts or PromptBuilder(client.tokenizer), settings)
    app = FastAPI(
        title="mmserve",
        version=mmserve.__version__,
        description="Documents in, answers with page citations out; chat and completions as OpenAI's.",
        lifespan=_lifespan,
    )
    app.state.server = state
    for router in (tasks, files, jobs, chat, completions, models, health):
        app.include_router(router.router)
    app.add_middleware(
        BodyLimit,
        default=settings.max_json_bytes,
        limits=dict.fromkeys(UPLOAD_PATHS, settings.max_upload_bytes),
    )
    install_error_handlers(app)
    install_openapi(app)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    state: ServerState = app.state.server
    state.engine.observers.append(state.metrics.observe)
    async with AsyncExitStack() as stack:
        stack.callback(state.engine.observers.remove, state.metrics.observe)
        try:
            await stack.enter_async_context(state.jobs)
        except MMServeError as error:
            state.startup_error = error
            raise
        yield
