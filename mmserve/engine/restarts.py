"""How often an engine process that has died is started again, and after what pause."""

import time
from collections import deque
from collections.abc import Callable

WINDOW_SECONDS = 600.0
FIRST_DELAY_SECONDS = 0.5


class RestartPolicy:
    """At most `max_restarts` in any `WINDOW_SECONDS`, each after twice the pause of the one before it there."""

    def __init__(self, max_restarts: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_restarts = max_restarts
        self._clock = clock
        self._times: deque[float] = deque()

    def next_delay(self) -> float | None:
        """Seconds to wait before the restart, which counts from now on; None if there were too many."""
        now = self._clock()
        while self._times and self._times[0] <= now - WINDOW_SECONDS:
            self._times.popleft()
        if len(self._times) >= self.max_restarts:
            return None
        self._times.append(now)
        return float(FIRST_DELAY_SECONDS * 2 ** (len(self._times) - 1))
