"""Fetches what a request names by URL, from the hosts that the operator allows and from public addresses alone.

Nothing is allowed by default. A name is resolved once a hop, all of its addresses have to be public, and the connection
goes to one that was checked: whoever answers the name's second question differently gains nothing. Redirects are
followed by hand, each checked as the first URL was.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import httpx

from mmserve.errors import RequestError
from mmserve.jobs.outbound import (
    AllowedHosts,
    IPAddress,
    PinnedTransport,
    Resolver,
    checked_url,
    is_public,
    plain_host,
    port_of,
    resolve,
)

MIB = 1024**2
MAX_REDIRECTS = 4
_REDIRECTS = frozenset((301, 302, 303, 307, 308))


@dataclass(frozen=True)
class MediaFetcher:
    """`timeout` is in seconds, over all hops. `resolve` and `permits` are there for tests."""

    allowed: AllowedHosts = field(default=AllowedHosts(()))
    max_bytes: int = 32 * MIB
    timeout: float = 20.0
    resolve: Resolver = field(default=resolve)
    permits: Callable[[IPAddress], bool] = field(default=is_public)

    async def fetch(self, url: str) -> bytes:
        """What lies at `url`. Raises `RequestError`: `url_not_allowed`, `url_unreachable`, `body_too_large`."""
        if not self.allowed.entries:
            raise RequestError(
                "url_not_allowed",
                "this server fetches nothing by URL: send the file itself as a data URL (its operator can allow hosts"
                " with --allowed-media-hosts)",
            )
        transport = PinnedTransport(self.resolve, self.permits)
        try:
            async with (
                asyncio.timeout(self.timeout),
                httpx.AsyncClient(transport=transport, trust_env=False, timeout=self.timeout) as client,
            ):
                return await self._follow(client, url)
        except (TimeoutError, httpx.TimeoutException):
            raise _unreachable(f"took longer than {self.timeout:g} seconds") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise _unreachable(f"could not be fetched ({type(error).__name__})") from None

    async def _follow(self, client: httpx.AsyncClient, url: str) -> bytes:
        target = self._checked(url)
        for _ in range(MAX_REDIRECTS + 1):
            async with self._opened(client, target) as response:
                if response.status_code not in _REDIRECTS:
                    return await self._read(response)
                target = self._checked(str(target.join(response.headers.get("location", ""))))
        raise _unreachable(f"redirects more than {MAX_REDIRECTS} times")

    def _checked(self, url: str) -> httpx.URL:
        target = checked_url(url)
        host = plain_host(target)
        if (host, port_of(target)) not in self.allowed:
            raise RequestError(
                "url_not_allowed",
                f"this server fetches nothing from {host}: send the file itself as a data URL (its operator can allow"
                " the host with --allowed-media-hosts)",
            )
        return target

    @contextlib.asynccontextmanager
    async def _opened(self, client: httpx.AsyncClient, url: httpx.URL) -> AsyncIterator[httpx.Response]:
        # What is not compressed cannot grow on arrival.
        headers = {"Accept-Encoding": "identity", "User-Agent": "mmserve"}
        async with client.stream("GET", url, headers=headers, follow_redirects=False) as response:
            yield response

    async def _read(self, response: httpx.Response) -> bytes:
        if response.status_code != 200:
            raise _unreachable(f"answers with status {response.status_code}")
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise _unreachable("answers with compressed content that was not asked for")
        declared = response.headers.get("content-length", "0")
        content = bytearray()
        if not declared.isdigit() or int(declared) <= self.max_bytes:
            async for chunk in response.aiter_raw():
                content += chunk
                if len(content) > self.max_bytes:
                    break
            else:
                return bytes(content)
        raise RequestError(
            "body_too_large", f"what lies at the URL is over {self.max_bytes:,} bytes: send a smaller file"
        )


def _unreachable(what: str) -> RequestError:
    return RequestError("url_unreachable", f"the URL {what}: check it, or send the file itself as a data URL")
