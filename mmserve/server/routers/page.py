"""`/`: the page for people, and what it is made of, which all comes from this server."""

from pathlib import Path

from fastapi import APIRouter, FastAPI
from fastapi.responses import FileResponse
from starlette.staticfiles import StaticFiles

STATIC_FOLDER = Path(__file__).parents[1] / "static"
router = APIRouter(include_in_schema=False)


@router.get("/")
async def page() -> FileResponse:
    """The page itself is no secret: what it shows, it asks for with the reader's key."""
    return FileResponse(STATIC_FOLDER / "index.html", media_type="text/html")


def mount_static(app: FastAPI) -> None:
    app.mount("/static", StaticFiles(directory=STATIC_FOLDER), name="static")
