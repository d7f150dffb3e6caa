"""Log lines as text or as JSON, with the request's id; and the line that says how a request went.

Nothing here shows what an exception says, only which one it was and where: its words may quote a document.
"""

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

from mmserve.config import LogFormat
from mmserve.errors import frames_of
from mmserve.server.request_id import REQUEST_ID

ACCESS_LOGGER = "mmserve.access"
ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]

# Fields that the line of a request says in its message as well.
_IN_MESSAGE = frozenset({"method", "route", "status"})
# What handlers of a request tell about it for its line; None outside of a request.
_REQUEST_FIELDS: ContextVar[dict[str, Any] | None] = ContextVar("request_fields", default=None)


class TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        record.exc_text = None
        request_id = REQUEST_ID.get()
        text = super().format(record)
        fields = "".join(f" {name}={value}" for name, value in _fields(record).items() if name not in _IN_MESSAGE)
        return f"{text}{fields}" + (f" [{request_id}]" if request_id else "")

    def formatException(self, ei: ExcInfo) -> str:
        return "" if ei[1] is None else frames_of(ei[1])


class JsonFormatter(logging.Formatter):
    """One object a line: time (UTC), level, logger, message, request_id where there is one, and further fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := REQUEST_ID.get():
            line["request_id"] = request_id
        line.update(_fields(record))
        if record.exc_info and record.exc_info[1] is not None:
            line["exception"] = frames_of(record.exc_info[1])
        return json.dumps(line, default=str, ensure_ascii=False)


def configure_logs(log_format: LogFormat, *, verbose: bool) -> None:
    """To standard error: warnings, all of the package's with `verbose`, and a line a request with either or as JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    logging.getLogger("mmserve").setLevel(logging.DEBUG if verbose else logging.WARNING)
    is_chatty = verbose or log_format == "json"
    logging.getLogger(ACCESS_LOGGER).setLevel(logging.INFO if is_chatty else logging.WARNING)
    if verbose:
        logging.getLogger(ACCESS_LOGGER).setLevel(logging.DEBUG)


def start_fields() -> dict[str, Any]:
    """A new request's fields, which `note` of it and of its tasks fills."""
    fields: dict[str, Any] = {}
    _REQUEST_FIELDS.set(fields)
    return fields


def note(**fields: Any) -> None:
    """Something about the request for its log line: numbers and names of ours, never what somebody sent."""
    kept = _REQUEST_FIELDS.get()
    if kept is not None:
        kept.update(fields)


def count(**numbers: int) -> None:
    """Like `note`, but added up over a request's documents."""
    kept = _REQUEST_FIELDS.get()
    if kept is not None:
        kept.update({name: kept.get(name, 0) + number for name, number in numbers.items()})


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(record, "fields", {})
    return fields
