"""Options of `mmserve serve` that say who may use the server."""

import ipaddress
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmserve.errors import RequestError

if TYPE_CHECKING:
    from mmserve.server.access import KeyRing
    from mmserve.server.settings import AccessSettings

_LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")


def _option(*names: str, help: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Access", **settings)


@dataclass(frozen=True, kw_only=True)
class AccessOptions:
    """API keys and what goes without them; what owners may notice of each other; browsers."""

    api_keys_file: Annotated[
        Path | None,
        _option(
            "--api-keys-file",
            "--api-keys",
            metavar="FILE",
            help="Keys that may use the server, one a line: name:key, or a key; # begins a comment. Read again when it"
            " changes. The variable MMSERVE_API_KEYS takes keys themselves, with spaces between them.",
            show_default="no keys",
        ),
    ] = None
    insecure: Annotated[
        bool, _option("--insecure", help="Listen without keys where other machines can reach the server.")
    ] = False
    open_metrics: Annotated[bool, _option("--open-metrics", help="/metrics needs no key.")] = False
    open_docs: Annotated[bool, _option("--open-docs", help="/docs and /openapi.json need no key.")] = False
    share_caches: Annotated[
        bool,
        _option("--share-caches", help="Keys share what was computed for prompts and pictures, and so may notice it."),
    ] = False
    rate_limit: Annotated[
        str | None, _option(metavar="RATE", help="Requests for work that a key may send, as 60/minute.")
    ] = None
    allowed_host: Annotated[
        list[str] | None,
        _option(
            metavar="NAME",
            help="Without keys: a name by which browsers may ask for this server, beside those of this machine;"
            " repeatable.",
        ),
    ] = None
    cors_origin: Annotated[
        list[str] | None,
        _option(metavar="ORIGIN", help="Site whose pages may use the server, as https://docs.example.org; repeatable."),
    ] = None

    def to_settings(self, host: str, address: str) -> "AccessSettings":
        """For a server that was told to listen on `host` and does so on `address`.

        Raises `RequestError` where others could reach it without a key, and naming the option at fault.
        """
        from mmserve.server.settings import AccessSettings

        keys = self._keys()
        is_local = ipaddress.ip_address(address.partition("%")[0]).is_loopback
        if keys is None and not is_local and not self.insecure:
            raise RequestError(
                "invalid_request",
                f"other machines could use the server at {host} without a key: give it --api-keys-file FILE or"
                " MMSERVE_API_KEYS, or say --insecure if whoever can reach it may use it",
                param="host",
            )
        chosen = tuple(self.allowed_host or ())
        local = (*_LOCAL_NAMES, f"[{host}]" if ":" in host else host)
        return AccessSettings(
            keys=keys,
            open_metrics=self.open_metrics,
            open_docs=self.open_docs,
            allowed_hosts=(*local, *chosen) if is_local or chosen else (),
            cors_origins=tuple(self.cors_origin or ()),
            rate_limit=self.rate_limit,
            share_caches=self.share_caches,
        )

    def _keys(self) -> "KeyRing | None":
        from mmserve.server.access import KEYS_VARIABLE, KeyRing

        # Workers, which read what strangers send, do not inherit it.
        listed = os.environ.pop(KEYS_VARIABLE, None)
        if listed is None and self.api_keys_file is None:
            return None
        return KeyRing(re.split(r"[\s,]+", listed or ""), path=self.api_keys_file)
