"""`GET /v1/models` and `GET /v1/models/{id}`."""

from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict

from mmserve.server.schemas.common import ERROR_RESPONSES
from mmserve.server.state import ServerState, State

router = APIRouter(tags=["models"])


_CARD: dict[str, Any] = {
    "id": "smollm2-135m",
    "object": "model",
    "created": 1767225600,
    "owned_by": "mmserve",
    "max_model_len": 8192,
}


class ModelCard(BaseModel):
    model_config = ConfigDict(json_schema_extra={"example": _CARD})

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["mmserve"] = "mmserve"
    max_model_len: int


class ModelList(BaseModel):
    model_config = ConfigDict(json_schema_extra={"example": {"object": "list", "data": [_CARD]}})

    object: Literal["list"] = "list"
    data: list[ModelCard]


@router.get("/v1/models")
async def list_models(state: State) -> ModelList:
    """The names under which the loaded model may be asked for; answers carry the first one."""
    return ModelList(data=[_card(state, name) for name in state.model_names])


@router.get("/v1/models/{model_id:path}", responses={404: ERROR_RESPONSES[404]})
async def retrieve_model(model_id: str, state: State) -> ModelCard:
    """The loaded model, by one of its names."""
    return _card(state, state.model_name(model_id))


def _card(state: ServerState, name: str) -> ModelCard:
    return ModelCard(id=name, created=state.started_at, max_model_len=state.engine.max_model_len)
