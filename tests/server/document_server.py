"""What the tests of the document routes share: owners by a header, small documents, and how to read a stream."""

import json
from typing import Any

import httpx
from scripted_engine import ScriptedEngine
from starlette.types import ASGIApp, Receive, Scope, Send

TEXT = b"Invoice of Hallam Pumps. The total is 1,284.50 EUR. It is due on 12 March.\n"
ANSWER = "The total is 1,284.50 EUR."
DAMAGED = b"%PDF-1.7\n" + b"\x00" * 200


class OwnerByHeader:
    """Whose request it is, as the header `x-owner` says."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            owner = dict(scope["headers"]).get(b"x-owner", b"local").decode()
            scope.setdefault("state", {})["owner"] = owner
        await self.app(scope, receive, send)


def scripted(**changes: Any) -> ScriptedEngine:
    return ScriptedEngine(**{"answer": ANSWER, "max_model_len": 30_000, **changes})


def events_of(text: str) -> list[tuple[str, dict[str, Any]]]:
    """(name, data) of each event of a stream, comments left out."""
    return [(name, data) for _, name, data in numbered_events_of(text)]


def numbered_events_of(text: str) -> list[tuple[int | None, str, dict[str, Any]]]:
    events = []
    for frame in text.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in frame.split("\n") if not line.startswith(":"))
        if fields:
            number = int(fields["id"]) if "id" in fields else None
            events.append((number, fields["event"], json.loads(fields["data"])))
    return events


def error_code(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]
