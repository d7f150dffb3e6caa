"""`/health`, `/ready`, `/version`, `/metrics`: what an operator's machinery asks."""

from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict

import mmserve
from mmserve.errors import EngineError
from mmserve.server.schemas.common import ERROR_RESPONSES
from mmserve.server.state import State

router = APIRouter(tags=["operation"])
UNAVAILABLE: dict[int | str, dict[str, Any]] = {503: ERROR_RESPONSES[503]}


class Status(BaseModel):
    model_config = ConfigDict(json_schema_extra={"example": {"status": "ok"}})

    status: str


class Version(BaseModel):
    model_config = ConfigDict(json_schema_extra={"example": {"version": "0.1.0"}})

    version: str


@router.get("/health", responses=UNAVAILABLE)
async def health(state: State) -> Status:
    """200 while the engine lives, or is loaded or started again; 503 once it stays dead: replace this process."""
    if state.engine.state == "dead":
        raise EngineError("engine_dead", "The engine has stopped; the server has to be started again.")
    return Status(status="ok")


@router.get("/ready", responses=UNAVAILABLE)
async def ready(state: State) -> Status:
    """200 once the model is loaded and warmed up, until the server shuts down; 503 with the reason otherwise."""
    state.require_ready()
    return Status(status="ready")


@router.get("/version")
async def version() -> Version:
    """The version of this server."""
    return Version(version=mmserve.__version__)


@router.get("/metrics", response_class=Response)
async def metrics(request: Request, state: State) -> Response:
    """Prometheus metrics, all named `mmserve_...`."""
    body, media_type = state.metrics.exposition(request.headers.get("accept", ""))
    return Response(body, headers={"Content-Type": media_type})
