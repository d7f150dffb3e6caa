"""Names that nobody can guess and that sort by the time of their making."""

import re
import secrets

from mmserve.errors import RequestError

_ID = re.compile(r"[a-z]+-[0-9a-f]{36}")


def new_id(kind: str, now: float) -> str:
    """`kind`, a hyphen, 12 hexadecimal digits of milliseconds and 24 of chance."""
    return f"{kind}-{int(now * 1000):012x}{secrets.token_hex(12)}"


def require_id(what: str, given: str) -> str:
    """Raises what a name that nothing has would raise: others may not even be fit for the database."""
    if _ID.fullmatch(given) is None:
        raise not_found(what)
    return given


def require_cursor(given: str | None) -> str | None:
    if given is not None and _ID.fullmatch(given) is None:
        raise RequestError("invalid_request", "after must be the id of the last entry that you have", param="after")
    return given


def not_found(what: str) -> RequestError:
    return RequestError("not_found", f"There is no such {what}: it was removed, has expired, or was never yours.")
