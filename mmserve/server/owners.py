"""What keeps owners apart: salts of the caches, and a fair share of what is scarce."""

import asyncio
import hashlib
import uuid
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import TYPE_CHECKING

from starlette.types import Scope

from mmserve.config import EngineConfig
from mmserve.errors import EngineError
from mmserve.request import ImageSpan, SamplingParams
from mmserve.server.request_id import REQUEST_ID

if TYPE_CHECKING:
    from mmserve.engine.client import CompletionDelta
    from mmserve.server.state import ServedEngine
    from mmserve.weights.tokenizer import Tokenizer

# Of a server without keys: the only one there is.
LOCAL_OWNER = "local"


def owner_of(scope: Scope) -> str:
    """Whose request it is, as its key has said."""
    owner: str = scope.get("state", {}).get("owner", LOCAL_OWNER)
    return owner


def cache_salt_of(owner: str, chosen: str | None = None, *, is_shared: bool = False) -> bytes:
    """What keeps an owner's part of the caches from others, and in it the part that a request has chosen.

    Empty for the only owner, and where the operator shares the caches.
    """
    own = b"" if is_shared or owner == LOCAL_OWNER else _digest(owner.encode())
    return own if chosen is None else _digest(chosen.encode(), key=own)


def _digest(content: bytes, key: bytes = b"") -> bytes:
    return hashlib.blake2b(content, digest_size=16, key=key).digest()


class OwnerEngine:
    """The engine as one owner's requests go to it: with the owner's salt, and under ids that name the HTTP request.

    With `places` they go to it one by one as the owner gets them, so that nobody's queue stands before another's.
    """

    def __init__(
        self, engine: "ServedEngine", owner: str, *, cache_salt: bytes = b"", places: "FairSlots | None" = None
    ) -> None:
        self._engine = engine
        self._owner = owner
        self._salts = {"cache_salt": cache_salt} if cache_salt else {}
        self._places = places

    @property
    def tokenizer(self) -> "Tokenizer":
        return self._engine.tokenizer

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    @property
    def config(self) -> EngineConfig:
        return self._engine.config

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        images: Sequence[ImageSpan] = (),
    ) -> "AsyncGenerator[CompletionDelta, None]":
        name, http_id = request_id or uuid.uuid4().hex, REQUEST_ID.get()
        # A client may send its id twice, and ids of the engine are each one's own.
        name = name if http_id is None else f"{name}@{http_id}"
        stream = self._engine.generate(prompt_token_ids, params, request_id=name, images=images, **self._salts)
        return stream if self._places is None else _in_turn(stream, self._places.of(self._owner))


async def _in_turn(
    stream: "AsyncGenerator[CompletionDelta, None]", place: AbstractAsyncContextManager[None]
) -> "AsyncGenerator[CompletionDelta, None]":
    """A stream that begins when there is a place for it."""
    async with place, aclosing(stream):
        async for delta in stream:
            yield delta


class FairSlots:
    """Places to work in. One that gets free goes to the owner who holds fewest; among equals they take turns.

    An owner's own requests are served in their order. `wait_seconds` bounds the waiting; None is no bound.
    """

    def __init__(self, num_slots: int, *, wait_seconds: float | None = None) -> None:
        self._num_free = num_slots
        self._wait_seconds = wait_seconds
        self._num_held: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @property
    def num_waiting(self) -> int:
        return sum(len(turns) for turns in self._waiting.values())

    @asynccontextmanager
    async def of(self, owner: str) -> AsyncIterator[None]:
        """A place for as long as the block lasts. Raises `EngineError` (`queue_full`) after `wait_seconds`."""
        await self._take(owner)
        try:
            yield
        finally:
            self._give_back(owner)

    async def _take(self, owner: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        self._let_in()
        try:
            async with asyncio.timeout(self._wait_seconds):
                await turn
        except BaseException as error:
            self._leave(owner, turn)
            if isinstance(error, TimeoutError):
                sentence = f"This request has waited {self._wait_seconds:g} seconds for its turn. Try again later."
                raise EngineError("queue_full", sentence) from None
            raise

    def _leave(self, owner: str, turn: asyncio.Future[None]) -> None:
        """It may have been let in just while it was told to leave."""
        if turn.done() and not turn.cancelled():
            self._give_back(owner)
            return
        turns = self._waiting.get(owner, deque())
        if turn in turns:
            turns.remove(turn)
            if not turns:
                del self._waiting[owner]

    def _give_back(self, owner: str) -> None:
        self._num_free += 1
        self._num_held -= Counter([owner])
        self._let_in()

    def _let_in(self) -> None:
        while self._num_free and self._waiting:
            owner = min(self._waiting, key=lambda owner: self._num_held[owner])
            turns = self._waiting.pop(owner)
            turn = turns.popleft()
            if turns:
                # Behind the others from now on.
                self._waiting[owner] = turns
            # One that is done was told to leave, and has not noticed yet.
            if not turn.done():
                self._num_free -= 1
                self._num_held[owner] += 1
                turn.set_result(None)
