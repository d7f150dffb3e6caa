"""Tells other servers that a job has ended: signed as Standard Webhooks has it, and again until they have taken it.

Nothing is sent but to the hosts that the operator allows. They have to be at public addresses, unless they are named in
full. Redirects are not followed.
"""

import asyncio
import base64
import binascii
import json
import logging
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import httpx
from sqlalchemy import Connection, Row, delete, func, insert, select, update
from standardwebhooks import Webhook

from mmserve.errors import MMServeError, RequestError
from mmserve.jobs.bells import heard
from mmserve.jobs.database import Database
from mmserve.jobs.ids import new_id
from mmserve.jobs.outbound import (
    AllowedHosts,
    PinnedTransport,
    Resolver,
    checked_url,
    is_public,
    parse_allowed_hosts,
    plain_host,
    port_of,
    resolve,
)
from mmserve.jobs.records import Job
from mmserve.jobs.tables import deliveries

# Seconds after the first, second ... attempt that failed: a day in all.
RETRY_SECONDS = (5, 300, 1800, 2 * 3600, 5 * 3600, 8 * 3600, 8 * 3600)
_SECRET_PREFIX = "whsec_"
_GONE = 410
_MAX_AT_ONCE = 8
_POLL_SECONDS = 60.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class WebhookOptions:
    """`hosts` are allowed; `secret` is `whsec_` and base64; `timeout` is in seconds. `resolve` is there for tests."""

    hosts: tuple[str, ...] = ()
    secret: str | None = field(default=None, repr=False)
    timeout: float = 20.0
    resolve: Resolver = field(default=resolve)

    def __post_init__(self) -> None:
        parse_allowed_hosts(self.hosts, option="webhook-hosts")
        if self.hosts and self.secret is None:
            raise RequestError(
                "invalid_request", "webhooks are signed: give a webhook secret, too (whsec_...)", param="webhook_secret"
            )
        if self.secret is not None:
            _check_secret(self.secret)

    @property
    def allowed(self) -> AllowedHosts:
        return AllowedHosts(self.hosts)


class WebhookOutbox:
    """What is to be delivered waits in the database, and so survives a restart."""

    def __init__(self, database: Database, options: WebhookOptions) -> None:
        self._database = database
        self._options = options
        self._bell = asyncio.Event()

    def check(self, url: str) -> None:
        """Raises `RequestError` (`url_not_allowed`) for where nothing is sent."""
        if not self._options.hosts:
            raise _refused("this server sends no webhooks (its operator can allow hosts with --webhook-hosts)")
        target = checked_url(url, param="webhook_url")
        host = plain_host(target)
        if (host, port_of(target)) not in self._options.allowed:
            raise _refused(f"this server sends no webhooks to {host} (its operator can allow it with --webhook-hosts)")

    def put_within(self, connection: Connection, job: Job) -> None:
        """Has the end of a job be told, at the transaction's end."""
        now = self._database.now()
        data = {name: value for name, value in job.to_dict().items() if name not in ("results", "options")}
        payload = {
            "type": f"job.{job.status}",
            "timestamp": datetime.fromtimestamp(now, UTC).isoformat().replace("+00:00", "Z"),
            "data": data,
        }
        row = {
            "id": new_id("msg", now),
            "url": job.webhook_url,
            "payload": payload,
            "num_attempts": 0,
            "next_attempt_at": now,
        }
        connection.execute(insert(deliveries), row)

    def wake(self) -> None:
        self._bell.set()

    async def run(self) -> None:
        """Delivers what is due, until it is cancelled."""
        while True:
            self._bell.clear()
            try:
                seconds = 0.0 if await self.deliver_due() else await self._seconds_to_next()
            except MMServeError as error:
                _log.warning("webhooks have to wait: %s", error)
                seconds = _POLL_SECONDS
            await heard(self._bell, seconds)

    async def deliver_due(self) -> int:
        """The number of attempts made."""
        due = await self._database.write(self._take_due)
        await asyncio.gather(*map(self._attempt, due))
        return len(due)

    def _take_due(self, connection: Connection) -> list[Row[Any]]:
        """They are put off first: if this server ends during the attempt, it is made again, and not by two at once."""
        now = self._database.now()
        query = select(deliveries).where(deliveries.c.next_attempt_at <= now).order_by(deliveries.c.next_attempt_at)
        rows = list(connection.execute(query.limit(_MAX_AT_ONCE).with_for_update(skip_locked=True)))
        later = now + 3 * self._options.timeout
        taken = deliveries.c.id.in_([row.id for row in rows])
        connection.execute(update(deliveries).where(taken).values(next_attempt_at=later))
        return rows

    async def _attempt(self, row: Row[Any]) -> None:
        outcome = await self._send(row)
        num_attempts = row.num_attempts + 1
        if outcome is not None:
            _log.warning("webhook %s, attempt %d: %s", row.id, num_attempts, outcome)
        if outcome in (None, _status(_GONE)) or num_attempts > len(RETRY_SECONDS):
            await self._database.write(lambda connection: connection.execute(_is(delete(deliveries), row)))
            return
        again_at = self._database.now() + RETRY_SECONDS[num_attempts - 1]
        put_off = _is(update(deliveries), row).values(num_attempts=num_attempts, next_attempt_at=again_at)
        await self._database.write(lambda connection: connection.execute(put_off))

    async def _send(self, row: Row[Any]) -> str | None:
        """None if it was taken, or what went wrong."""
        try:
            # Hosts that were allowed when the job was made may not be any more.
            self.check(row.url)
            async with asyncio.timeout(self._options.timeout):
                status = await self._post(row)
        except RequestError as error:
            return error.code
        except (TimeoutError, httpx.HTTPError, OSError) as error:
            return type(error).__name__
        except Exception as error:
            # One that cannot be sent, whatever its fault, must not hold up the others.
            _log.exception("webhook %s met a fault", row.id)
            return type(error).__name__
        return None if 200 <= status < 300 else _status(status)

    async def _post(self, row: Row[Any]) -> int:
        now = datetime.fromtimestamp(int(self._database.now()), UTC)
        body = json.dumps(row.payload)
        assert self._options.secret is not None
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "mmserve",
            "webhook-id": row.id,
            "webhook-timestamp": str(int(now.timestamp())),
            "webhook-signature": Webhook(self._options.secret).sign(row.id, now, body),
        }
        async with (
            httpx.AsyncClient(transport=self._transport(row.url), trust_env=False, timeout=None) as client,
            client.stream("POST", row.url, content=body, headers=headers, follow_redirects=False) as response,
        ):
            return response.status_code

    def _transport(self, url: str) -> PinnedTransport:
        target = httpx.URL(url)
        is_named = self._options.allowed.names(plain_host(target), port_of(target))
        return PinnedTransport(self._options.resolve, (lambda _address: True) if is_named else is_public)

    async def _seconds_to_next(self) -> float:
        query = select(func.min(deliveries.c.next_attempt_at))
        next_at = await self._database.read(lambda connection: connection.execute(query).scalar_one())
        return _POLL_SECONDS if next_at is None else min(max(next_at - self._database.now(), 0.0), _POLL_SECONDS)


def _is(query: Any, row: Row[Any]) -> Any:
    return query.where(deliveries.c.id == row.id)


def _status(status: int) -> str:
    return f"status {status}"


def _refused(sentence: str) -> RequestError:
    return RequestError("url_not_allowed", sentence, param="webhook_url")


def _check_secret(secret: str) -> None:
    encoded = secret.removeprefix(_SECRET_PREFIX)
    try:
        key = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if encoded == secret or not 24 <= len(key) <= 64:
        raise RequestError(
            "invalid_request", "a webhook secret is whsec_ and 24 to 64 bytes in base64", param="webhook_secret"
        )
