"""`/docs`: Swagger UI over `/openapi.json`, from files of this machine alone."""

from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import FileResponse, HTMLResponse, Response

from mmserve.errors import RequestError

DOCS_PATHS = ("/docs", "/docs/start.js", "/docs/swagger-ui-bundle.js", "/docs/swagger-ui.css", "/openapi.json")
# Only their files are used: the package's own application is not.
_FILES = files("fastapi_offline") / "static"
_MEDIA_TYPES = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css"}
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>mmserve: the HTTP interface</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<div id="swagger-ui"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
</body>
</html>
"""
_START = 'SwaggerUIBundle({url: "openapi.json", dom_id: "#swagger-ui", deepLinking: true, validatorUrl: null});\n'

router = APIRouter(include_in_schema=False)


@router.get("/docs")
async def docs() -> Response:
    return HTMLResponse(_PAGE)


@router.get("/docs/start.js")
async def start() -> Response:
    return Response(_START, media_type="text/javascript")


@router.get("/docs/{name}")
async def asset(name: str) -> Response:
    if name not in _MEDIA_TYPES:
        raise RequestError("not_found", "There is nothing at this address; /docs lists what this server offers.")
    return FileResponse(str(_FILES / name), media_type=_MEDIA_TYPES[name])
