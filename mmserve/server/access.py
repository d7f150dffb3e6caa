"""API keys: who may use the server, and as which owner."""

import hashlib
import hmac
import logging
import re
from collections.abc import Iterable
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from mmserve.errors import RequestError
from mmserve.server.errors import error_response

logger = logging.getLogger(__name__)

KEYS_VARIABLE = "MMSERVE_API_KEYS"
MIN_KEY_CHARACTERS = 16
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_KEY = re.compile(rf"[!-~]{{{MIN_KEY_CHARACTERS},}}")
_ALWAYS_OPEN = frozenset({"/", "/health", "/ready"})
_OPEN_FOLDER = "/static/"

Known = tuple[tuple[bytes, str], ...]


class KeyRing:
    """Digests of the keys that are accepted, each with its owner; the keys themselves are not kept.

    A line is `name:key` or a key; a line that begins with # is a comment. The owner is a digest of the name, so that
    another key of the same name takes its place; without a name, of the key. The file is read again when it changes;
    while it cannot be, the keys from before stay in force.
    """

    def __init__(self, lines: Iterable[str] = (), *, path: Path | None = None) -> None:
        """Keys of `lines` and of the file. Raises `RequestError`, which says which line is wrong, never what it is."""
        self._fixed = _parse(lines, KEYS_VARIABLE)
        self._path = path
        self._stamp = _stamp_of(path)
        self._known = self._all_keys()

    def __repr__(self) -> str:
        return f"KeyRing({len(self._known)} keys)"

    def owner_of(self, key: bytes) -> str | None:
        """The owner, or None. All keys are compared, whatever the first ones say, and each in constant time."""
        self._read_again()
        digest = hashlib.sha256(key).digest()
        owners = [owner for known, owner in self._known if hmac.compare_digest(known, digest)]
        return owners[0] if owners else None

    def _all_keys(self) -> Known:
        known = self._fixed + (() if self._path is None else _parse(_lines_of(self._path), str(self._path)))
        if not known:
            raise RequestError("invalid_request", f"{self._path or KEYS_VARIABLE} has no API key: write one a line")
        if len({digest for digest, _ in known}) < len(known):
            raise RequestError("invalid_request", f"{self._path or KEYS_VARIABLE} has a key twice: leave one of them")
        return known

    def _read_again(self) -> None:
        stamp = _stamp_of(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._known = self._all_keys()
        except RequestError as error:
            logger.error("%s; the API keys from before stay in force", error)
        else:
            logger.info("the API keys were read again: there are %d", len(self._known))


class RequireKey:
    """Lets requests with a known key through, and says whose they are (`request.state.owner`); others get a 401.

    Without `keys` all are let through. `open_paths` need no key.
    """

    def __init__(self, app: ASGIApp, *, keys: KeyRing | None, open_paths: Iterable[str] = ()) -> None:
        self.app = app
        self._keys = keys
        self._open_paths = _ALWAYS_OPEN | frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._keys is None:
            await self.app(scope, receive, send)
            return
        sent = _sent_keys(scope)
        owner = self._keys.owner_of(sent.pop()) if len(sent) == 1 else None
        if owner is not None:
            scope.setdefault("state", {})["owner"] = owner
        elif not self._is_open(scope["path"]):
            await self._refuse(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _is_open(self, path: str) -> bool:
        return path in self._open_paths or path.startswith(_OPEN_FOLDER)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        sentences = {
            0: "This server needs an API key: send it as Authorization: Bearer KEY, or as X-Api-Key: KEY.",
            1: "The API key of this request is not known here. Check it, or ask the operator of this server for one.",
        }
        several = "This request has several API keys, which differ: send one of them."
        sentence = sentences.get(len(_sent_keys(scope)), several)
        response = error_response(RequestError("unauthorized", sentence))
        response.headers["WWW-Authenticate"] = "Bearer"
        await response(scope, receive, send)


def _sent_keys(scope: Scope) -> set[bytes]:
    """The different keys of a request's headers: the same one in both of them is one."""
    keys = set()
    for name, value in scope["headers"]:
        if name.lower() == b"x-api-key":
            keys.add(value.strip())
        elif name.lower() == b"authorization":
            scheme, _, credentials = value.strip().partition(b" ")
            if scheme.lower() == b"bearer":
                keys.add(credentials.strip())
    return keys


def _parse(lines: Iterable[str], source: str) -> Known:
    known = []
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        name, separator, key = text.partition(":")
        if not separator:
            name, key = "", text
        if separator and not _NAME.fullmatch(name.strip()):
            raise _wrong_line(source, number, "a name has letters, digits, dots, dashes and underscores, 64 at most")
        if not _KEY.fullmatch(key.strip()):
            characters = f"a key has {MIN_KEY_CHARACTERS} characters or more, visible ones of ASCII"
            raise _wrong_line(source, number, f"{characters}; python -c 'import secrets; print(secrets.token_hex(32))'")
        secret = key.strip().encode("ascii")
        identity = f"name:{name.strip()}".encode() if separator else b"key:" + secret
        known.append((hashlib.sha256(secret).digest(), hashlib.sha256(identity).hexdigest()[:32]))
    return tuple(known)


def _wrong_line(source: str, number: int, what: str) -> RequestError:
    return RequestError("invalid_request", f"{source}, line {number}: {what}", param="api-keys-file")


def _lines_of(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
        raise RequestError("invalid_request", f"{path} cannot be read: {reason}", param="api-keys-file") from None


def _stamp_of(path: Path | None) -> tuple[int, int, int] | None:
    """Changes with the file's content; None for a file that is not there."""
    if path is None:
        return None
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
