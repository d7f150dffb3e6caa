"""Work at once, none of which goes on when its caller has left."""

import asyncio
from collections.abc import Collection, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What they return, in order; when one fails, the others are ended."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await end_all(tasks)


async def end_all(futures: Collection[asyncio.Future[Any]]) -> None:
    """Cancels what has not ended, and waits until all have; how they end is nobody's business any more."""
    for future in futures:
        future.cancel()
    await asyncio.gather(*futures, return_exceptions=True)
