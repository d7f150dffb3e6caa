"""`/openapi.json`: what the routes say of themselves, with the bodies that they read by hand."""

from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from mmserve.server.schemas.operations import BODY_MODELS, REFERENCE

_VALIDATION_ERROR = "HTTPValidationError"


def install_openapi(app: FastAPI) -> None:
    make = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            _complete(make())
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _complete(schema: dict[str, Any]) -> None:
    """Bodies that the framework does not know of are added, and an error that no route answers with is left out."""
    schemas = schema["components"]["schemas"]
    _, bodies = models_json_schema([(model, "validation") for model in BODY_MODELS], ref_template=REFERENCE)
    schemas.update(bodies["$defs"])
    for name in (_VALIDATION_ERROR, "ValidationError"):
        schemas.pop(name, None)
    for path in schema["paths"].values():
        for operation in path.values():
            _leave_out_validation_error(operation)


def _leave_out_validation_error(operation: dict[str, Any]) -> None:
    told = operation["responses"].get("422", {}).get("content", {}).get("application/json", {}).get("schema", {})
    if told.get("$ref", "").endswith(_VALIDATION_ERROR):
        del operation["responses"]["422"]
