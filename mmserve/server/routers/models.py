"""`GET /v1/models` and `GET /v1/models/{id}`."""

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel

from mmserve.server.schemas.common import ERROR_RESPONSES
from mmserve.server.state import ServerState, State

router = APIRouter(tags=["models"])


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["mmserve"] = "mmserve"
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


@router.get("/v1/models")
async def list_models(state: State) -> ModelList:
    """The names under which the loaded model may be asked for; answers carry the first one."""
    return ModelList(data=[_card(state, name) for name in state.model_names])


@router.get("/v1/models/{model_id:path}", responses={404: ERROR_RESPONSES[404]})
async def retrieve_model(model_id: str, state: State) -> ModelCard:
    return _card(state, state.model_name(model_id))


def _card(state: ServerState, name: str) -> ModelCard:
    return ModelCard(id=name, created=state.started_at, max_model_len=state.engine.max_model_len)
