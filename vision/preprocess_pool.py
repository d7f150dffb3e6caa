"""Pictures -> pixels or patches in shared memory, in worker processes, each picture once.

What was processed is kept by its digest while a request needs it, and beyond that until its room is needed. Requests
wait, in their order, while those before them hold all the room there is: host memory is bounded however many come.
"""

import asyncio
import contextlib
import hashlib
import itertools
import os
import threading
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from mmserve.config import GIB
from mmserve.errors import DocumentError, RequestError
from mmserve.request import PatchesRef
from mmserve.vision.decoded_picture import DecodedPicture, PictureSource
from mmserve.vision.image_plan import ImagePlan, ImageProcessor, plan_image, settings_digest
from mmserve.vision.image_source import ImageSource, PixelLimits
from mmserve.vision.page_types import PageLimits, PageOptions
from mmserve.vision.patches import num_bytes, unlink, unlink_marked
from mmserve.vision.picture_threads import PictureThreads
from mmserve.vision.preprocess_worker import PixelsOn, Processed
from mmserve.vision.worker_pool import WorkerEntry, WorkerPool, reader_closed

# The costliest family has 64 tokens for a tile of 512 x 512 pixels, in float32.
_MOST_BYTES_PER_TOKEN = 3 * 512 * 512 * 4 // 64
_MAX_KNOWN_SIZES = 4096
_SETTLE_SECONDS = 10.0


@dataclass(frozen=True)
class PlannedImage:
    """A picture, the budget that was given for it, and what became of both. Only pictures of one salt are shared."""

    source: PictureSource
    limits: PixelLimits
    plan: ImagePlan
    cache_salt: bytes = b""


@dataclass
class PreprocessStats:
    """Running totals: pictures that were processed, and the seconds that this took outside the engine."""

    num_images: int = 0
    seconds: float = 0.0


@dataclass
class _Entry:
    task: asyncio.Task[Processed]
    num_pins: int = 0
    size_bytes: int = 0
    segments: tuple[PatchesRef, ...] = ()

    @property
    def has_failed(self) -> bool:
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)


@dataclass
class PreprocessPool:
    """One event loop at a time uses it. Processes start with the first picture; `close` ends them.

    With `pixels_on="device"` pictures are shared as they are, for an engine that scales and cuts them on a device of
    `device_type`.

    `settle` is the engine's: it may still be about to read the patches of a request that was given up, and they are
    taken away only when that future is done.
    """

    processor: ImageProcessor
    num_workers: int = 2
    limits: PageLimits = field(default_factory=PageLimits)
    capacity_bytes: int = 0
    settle: Callable[[], Future[None]] | None = None
    pixels_on: PixelsOn = "worker"
    device_type: str = "cpu"

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise RequestError("invalid_request", "--num-preprocess-workers must be at least 1")
        self.capacity_bytes = self.capacity_bytes or _default_capacity()
        self.stats = PreprocessStats()
        self._workers = WorkerPool(self.num_workers, self.limits, PageOptions(ocr="off"), self._entry_point)
        self._threads = PictureThreads(self.num_workers)
        self._settings_digest = settings_digest(self.processor, self.device_type if self._on_device else "cpu")
        self._room = Room(self.capacity_bytes)
        self._sizes: OrderedDict[tuple[bytes, bytes], tuple[int, int]] = OrderedDict()
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._bytes_per_token = 0.0
        # `close` may run in another thread than the event loop.
        self._lock = threading.RLock()
        self._is_closed = False
        # Short: some systems take names of 30 characters.
        self._mark = f"mm-{uuid.uuid4().hex[:8]}"
        self._numbers = itertools.count()

    @property
    def num_bytes(self) -> int:
        """Shared memory of all pictures that are kept."""
        return sum(entry.size_bytes for entry in self._entries.values())

    @property
    def num_pinned(self) -> int:
        return sum(entry.num_pins > 0 for entry in self._entries.values())

    @property
    def _on_device(self) -> bool:
        return self.pixels_on == "device"

    async def plan(self, source: PictureSource, limits: PixelLimits, cache_salt: bytes = b"") -> PlannedImage:
        """What the picture becomes, by its size alone: no pixel is decoded. `cache_salt` has 64 bytes at most.

        Raises `DocumentError` for a file that cannot be read, `RequestError` for a shape that no encoder takes.
        """
        width, height = await self._size(source, cache_salt)
        return PlannedImage(source, limits, plan_image(self.processor, width, height, limits), cache_salt)

    async def _size(self, source: PictureSource, cache_salt: bytes) -> tuple[int, int]:
        if isinstance(source, DecodedPicture):
            return await self._threads.read(source)
        size = self._sizes.get((source.digest, cache_salt))
        if size is None:
            size = await self._call(source, "measure", source)
            self._sizes[source.digest, cache_salt] = size
            while len(self._sizes) > _MAX_KNOWN_SIZES:
                self._sizes.popitem(last=False)
        return size

    @asynccontextmanager
    async def hold(self, images: Sequence[PlannedImage]) -> AsyncIterator[list[Processed]]:
        """The pictures' patches, which stay where they are until the block is left.

        Raises `DocumentError` for a picture that cannot be read.
        """
        async with self._room.taken(self._most_bytes(images)):
            digests: list[bytes] = []
            tasks: list[asyncio.Task[Processed]] = []
            try:
                for image in images:
                    digest = self.digest(image)
                    tasks.append(self._pin(digest, image))
                    digests.append(digest)
                # A task that is done may be of an event loop that is closed.
                if running := [task for task in tasks if not task.done()]:
                    # One task may serve several requests: none of them cancels it.
                    await asyncio.wait(running)
                yield [task.result() for task in tasks]
            finally:
                for digest in digests:
                    self._release(digest)

    def digest(self, image: PlannedImage) -> bytes:
        """Identity of a picture's patches: of its source, of all that decides its pixels, and of who may share them."""
        parts = (image.source.digest, self._settings_digest, image.plan.digest)
        return hashlib.blake2b(b"".join(parts), digest_size=16, key=image.cache_salt).digest()

    def close(self) -> None:
        """End the processes and give all shared memory back; what is under way ends with `shutting_down`."""
        with self._lock:
            self._is_closed = True
        self._workers.close()
        self._threads.close()
        if self.settle is not None and self._entries:
            with contextlib.suppress(TimeoutError):
                self.settle().result(_SETTLE_SECONDS)
        with self._lock:
            while self._entries:
                _unlink(self._entries.popitem()[1].segments)
        unlink_marked(self._mark)

    def _entry_point(self) -> WorkerEntry:
        from mmserve.vision.preprocess_worker import start_preprocess_worker

        return WorkerEntry(start_preprocess_worker, (self.processor, self.limits, self.pixels_on))

    def _most_bytes(self, images: Sequence[PlannedImage]) -> int:
        """An upper bound; of patches, from what this model's pictures were found to take."""
        if self._on_device:
            return sum(3 * image.plan.width * image.plan.height for image in images)
        per_token = 1.5 * self._bytes_per_token or _MOST_BYTES_PER_TOKEN
        return int(sum(image.plan.num_tokens for image in images) * per_token)

    def _pin(self, digest: bytes, image: PlannedImage) -> asyncio.Task[Processed]:
        with self._lock:
            if self._is_closed:
                raise reader_closed()
            known = self._entries.get(digest)
            if known is None or (known.num_pins == 0 and known.has_failed):
                task = asyncio.create_task(self._process(digest, image))
                task.add_done_callback(lambda done: done.cancelled() or done.exception())
                self._entries[digest] = _Entry(task)
            self._entries[digest].num_pins += 1
            self._entries.move_to_end(digest)
            return self._entries[digest].task

    def _release(self, digest: bytes) -> None:
        with self._lock:
            entry = self._entries.get(digest)
            if entry is None:
                return
            entry.num_pins -= 1
            if entry.num_pins == 0 and entry.has_failed:
                del self._entries[digest]
            self._make_room()

    async def _process(self, digest: bytes, image: PlannedImage) -> Processed:
        processed = await self._processed(image)
        size = sum(map(num_bytes, processed.segments))
        with self._lock:
            if self._is_closed:
                _unlink(processed.segments)
                raise reader_closed()
            entry = self._entries[digest]
            entry.size_bytes, entry.segments = size, processed.segments
            self._bytes_per_token = max(self._bytes_per_token, size / processed.plan.num_tokens)
            self.stats.num_images += 1
            self.stats.seconds += processed.seconds
            self._make_room()
        return processed

    async def _processed(self, image: PlannedImage) -> Processed:
        source, plan = image.source, image.plan
        if isinstance(source, ImageSource):
            return await self._call_to_share(source, "process", source, plan, image.limits)
        started = time.perf_counter()
        refs = await self._threads.share(source, plan)
        if self._on_device:
            return Processed(plan, refs, time.perf_counter() - started)
        try:
            return await self._call_to_share(source, "cut", refs[0], plan)
        finally:
            unlink(refs[0])

    async def _call_to_share(self, source: PictureSource, method: str, *args: object) -> Processed:
        """A call that shares pixels; what a worker that was ended in the midst of it had shared is given back."""
        mark = f"{self._mark}-{next(self._numbers)}"
        segments: tuple[PatchesRef, ...] = ()
        try:
            processed: Processed = await self._call(source, method, *args, mark)
            segments = processed.segments
        finally:
            unlink_marked(mark, but=segments)
        return processed

    async def _call(self, source: PictureSource, method: str, *args: object) -> Any:
        try:
            return await self._workers.call(method, *args, timeout=self.limits.page_timeout)
        except DocumentError as error:
            name = source.document.name if isinstance(source, ImageSource) else source.name
            raise (error if name in error.message else error.about(source.name)) from None

    def _make_room(self) -> None:
        """Forget what no request needs, what was used longest ago first, as far as room is short."""
        excess = self.num_bytes - self.capacity_bytes
        for digest, entry in list(self._entries.items()):
            if excess <= 0:
                return
            if entry.num_pins == 0 and entry.task.done():
                excess -= entry.size_bytes
                self._take_away(self._entries.pop(digest))

    def _take_away(self, entry: _Entry) -> None:
        if self.settle is None:
            _unlink(entry.segments)
        else:
            self.settle().add_done_callback(lambda _: _unlink(entry.segments))


def _unlink(segments: Iterable[PatchesRef]) -> None:
    for ref in segments:
        unlink(ref)


class Room:
    """Bytes that requests take for a while, first come, first served; more than there are is taken alone."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._num_taken = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def taken(self, size_bytes: int) -> AsyncIterator[None]:
        await self._take(size_bytes)
        try:
            yield
        finally:
            self._num_taken -= size_bytes
            self._let_in()

    async def _take(self, size_bytes: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size_bytes, turn))
        self._let_in()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._num_taken -= size_bytes
            self._let_in()
            raise

    def _let_in(self) -> None:
        while self._waiting:
            size_bytes, turn = self._waiting[0]
            if turn.cancelled():
                # Who waited was told to leave, and may not have noticed yet.
                self._waiting.popleft()
                continue
            if self._num_taken and self._num_taken + size_bytes > self._capacity_bytes:
                return
            self._waiting.popleft()
            self._num_taken += size_bytes
            turn.set_result(None)


def _default_capacity() -> int:
    """Half of the shared memory that is free, 4 GiB at most."""
    try:
        space = os.statvfs("/dev/shm")
    except FileNotFoundError:
        return GIB
    return min(4 * GIB, space.f_bavail * space.f_frsize // 2)
