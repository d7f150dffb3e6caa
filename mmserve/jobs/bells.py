"""Waking those of this process who wait for news."""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Iterator


async def heard(bell: asyncio.Event, seconds: float) -> None:
    """Returns when the bell rings, or after so many seconds."""
    # In Python 3.11, `asyncio.wait_for` loses a cancellation that comes together with the bell.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await bell.wait()


class Bells:
    """Wakes those who wait for news of a job. Of one event loop."""

    def __init__(self) -> None:
        self._listeners: defaultdict[str, set[asyncio.Event]] = defaultdict(set)

    @contextlib.contextmanager
    def listening(self, job_id: str) -> Iterator[asyncio.Event]:
        bell = asyncio.Event()
        self._listeners[job_id].add(bell)
        try:
            yield bell
        finally:
            self._listeners[job_id].discard(bell)
            if not self._listeners[job_id]:
                del self._listeners[job_id]

    def ring(self, job_id: str) -> None:
        for bell in self._listeners.get(job_id, ()):
            bell.set()
