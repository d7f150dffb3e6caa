"""Threads for decoded pictures: hashing and copying them takes milliseconds, which an event loop does not have."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from mmserve.vision.decoded_picture import DecodedPicture
from mmserve.vision.image_plan import ImagePlan
from mmserve.vision.patches import unlink
from mmserve.vision.picture_ref import PictureRef, share_picture
from mmserve.vision.worker_pool import reader_closed

R = TypeVar("R")


class PictureThreads:
    """Two queues, each in order: that many pictures wait to be read does not keep the first from being shared."""

    def __init__(self, num_threads: int) -> None:
        self._reading = ThreadPoolExecutor(num_threads, "read-pictures")
        self._sharing = ThreadPoolExecutor(num_threads, "share-pictures")
        self._is_closed = False

    async def read(self, picture: DecodedPicture) -> tuple[int, int]:
        """Width and height; its pixels and digest are known from then on. Raises `DocumentError`."""
        await self._wait(self._submit(self._reading, lambda: picture.digest))
        return picture.size

    async def share(self, picture: DecodedPicture, plan: ImagePlan) -> tuple[PictureRef, ...]:
        """As `share_picture` does it, for a picture that was read."""
        future = self._submit(self._sharing, lambda: share_picture(picture.pixels, plan))
        try:
            return await self._wait(future)
        except asyncio.CancelledError:
            future.add_done_callback(_unlink_shared)
            raise

    def close(self) -> None:
        self._is_closed = True
        for threads in (self._reading, self._sharing):
            threads.shutdown(cancel_futures=True)

    def _submit(self, threads: ThreadPoolExecutor, function: Callable[[], R]) -> Future[R]:
        if self._is_closed:
            raise reader_closed()
        return threads.submit(function)

    async def _wait(self, future: Future[R]) -> R:
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._is_closed and task is not None and not task.cancelling():
                raise reader_closed() from None
            raise


def _unlink_shared(future: Future[tuple[PictureRef, ...]]) -> None:
    """Nobody waits for the picture any more."""
    if not future.cancelled() and future.exception() is None:
        unlink(future.result()[0])
