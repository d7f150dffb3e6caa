"""Names of files and folders as they come from a shell."""

import tempfile
from pathlib import Path

import typer

from mmserve.errors import RequestError


def named_path(text: str) -> Path:
    """For Typer's `parser`: a variable of the shell that is not set would, as a path, be the folder one stands in."""
    if not text:
        raise typer.BadParameter("an empty name stands for no file or folder")
    return Path(text)


def writable_folder(path: Path, param: str) -> None:
    """Makes it if need be. Raises `RequestError` naming the folder: better before the work than after it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except FileExistsError:
        raise RequestError("invalid_request", f"{path} is not a folder", param=param) from None
    except OSError as error:
        raise RequestError("invalid_request", f"{path} cannot be written to: {error.strerror}", param=param) from None
