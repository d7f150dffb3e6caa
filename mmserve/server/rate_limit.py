"""How often an owner may ask for work: a moving window, in the memory of this process."""

import math
import time

from limits import RateLimitItem, parse
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mmserve.errors import RequestError
from mmserve.server.errors import error_response
from mmserve.server.owners import owner_of


def parse_rate(rate: str) -> RateLimitItem:
    """`60/minute`, `1000 per 2 hours`. Raises `RequestError`."""
    try:
        item = parse(rate)
    except ValueError:
        item = None
    if item is None or item.amount < 1:
        raise RequestError(
            "invalid_request", f"--rate-limit takes requests and time, as 60/minute: not {rate!r}", param="rate-limit"
        )
    return item


class RateLimit:
    """Counts each owner's requests for work, which are those with POST under /v1/; tells how many are left.

    Looking at files, jobs and results is not counted.
    """

    def __init__(self, app: ASGIApp, *, rate: str) -> None:
        self.app = app
        self._item = parse_rate(rate)
        self._limiter = MovingWindowRateLimiter(MemoryStorage())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].startswith("/v1/"):
            await self.app(scope, receive, send)
            return
        owner = owner_of(scope)
        is_within = self._limiter.hit(self._item, owner)
        window = self._limiter.get_window_stats(self._item, owner)
        seconds = max(math.ceil(window.reset_time - time.time()), 1)
        told = {
            "RateLimit-Limit": str(self._item.amount),
            "RateLimit-Remaining": str(window.remaining),
            "RateLimit-Reset": str(seconds),
        }

        async def send_with_count(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(told)
            await send(message)

        if is_within:
            await self.app(scope, receive, send_with_count)
            return
        response = error_response(
            RequestError("rate_limited", f"More than {self._item} is more than this server allows. See Retry-After.")
        )
        response.headers["Retry-After"] = str(seconds)
        await response(scope, receive, send_with_count)
