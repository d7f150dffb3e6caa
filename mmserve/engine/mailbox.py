"""Where one request's answers grow, between the engine's outputs and whoever reads them."""

import asyncio
from collections.abc import Callable, Mapping

from mmserve.engine.completion import AnswerBuilder, CompletionDelta
from mmserve.engine.messages import TokenOutput
from mmserve.engine.transport import Transport


class Mailbox:
    """Outputs in, deltas out, for one reader; nobody but its event loop touches them.

    An output is worked off when it comes, not when it is read: a slow reader delays neither the end at a stop string
    nor the clock. `on_end` gets the id of a sequence that is done, and whether the engine still has to be told.
    `transport`, which the client sets, leads to the engine that was asked: no other one knows the request.
    """

    transport: Transport

    def __init__(
        self,
        request_id: str,
        loop: asyncio.AbstractEventLoop,
        builders: Mapping[str, AnswerBuilder],
        on_end: Callable[[str, bool], None],
    ) -> None:
        self.request_id = request_id
        self.loop = loop
        self.open_ids: set[str] = set()
        self._builders = builders
        self._on_end = on_end
        self._deltas: list[CompletionDelta] = []
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None

    @property
    def has_more(self) -> bool:
        return bool(self.open_ids or self._deltas)

    def put(self, output: TokenOutput) -> None:
        if output.request_id not in self.open_ids:
            return
        try:
            delta = self._builders[output.request_id].push(output)
        except Exception as error:
            self.fail(error)
            return
        if delta.finish_reason is not None:
            self._on_end(output.request_id, output.finish_reason is None)
        self._deltas.append(delta)
        self._wake_reader()

    def fail(self, error: Exception) -> None:
        """The reader gets what has come so far, and then the error."""
        self._error = self._error or error
        self._wake_reader()

    async def take(self) -> list[CompletionDelta]:
        """All that has come since the last call, waiting until there is something."""
        while not self._deltas:
            if self._error is not None:
                raise self._error
            self._reader = self.loop.create_future()
            await self._reader
        deltas, self._deltas = self._deltas, []
        return deltas

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
