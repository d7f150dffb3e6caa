"""Pictures through worker processes into shared memory: each once, held while needed, and bounded."""

import asyncio
import hashlib
import io
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mmserve.errors import DocumentError, EngineError, MMServeError, RequestError
from mmserve.vision.decoded_picture import DecodedPicture
from mmserve.vision.image_plan import plan_image
from mmserve.vision.image_source import AUTO_PIXELS, AUTO_TOKENS, ImageSource, PixelLimits
from mmserve.vision.page_types import Document
from mmserve.vision.patches import load, num_bytes
from mmserve.vision.preprocess_pool import PreprocessPool, Room
from mmserve.vision.preprocess_worker import Processed
from mmserve.vision.processors.qwen import QwenProcessor
from mmserve.vision.processors.settings import Normalisation

PROCESSOR = QwenProcessor(
    image_token_id=9,
    patch_size=14,
    merge_size=2,
    temporal_patch_size=2,
    min_pixels=784,
    max_pixels=60_000,
    resample="bicubic",
    normalise=Normalisation(1 / 255, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
)
SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture(scope="module")
def pool() -> Iterator[PreprocessPool]:
    pool = PreprocessPool(PROCESSOR, num_workers=1, capacity_bytes=10_000_000)
    yield pool
    pool.close()


def segments(processed: Iterable[Processed]) -> list[str]:
    """Those of their segments that exist."""
    names = {ref.segment for each in processed for ref in each.patches}
    return [name for name in sorted(names) if (SHARED_MEMORY / name).exists()]


def picture(folder: Path, seed: int, width: int = 120, height: int = 90, *, orientation: int = 1) -> ImageSource:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    target = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(target, "PNG", exif=exif)
    return source(folder / f"{seed}.png", target.getvalue())


def source(path: Path, content: bytes, media_type: str = "image/png") -> ImageSource:
    path.write_bytes(content)
    return ImageSource(Document(path, path.name, media_type, hashlib.sha256(content).hexdigest(), 1))


async def process(pool: PreprocessPool, *sources: ImageSource, limits: PixelLimits | None = None) -> list[Processed]:
    planned = [await pool.plan(each, limits or PixelLimits()) for each in sources]
    async with pool.hold(planned) as processed:
        return processed


def test_patches_are_those_of_the_processor(pool: PreprocessPool, tmp_path: Path) -> None:
    image = picture(tmp_path, 1)

    async def run() -> None:
        planned = await pool.plan(image, PixelLimits())
        async with pool.hold([planned]) as (processed,):
            pixels = torch.from_numpy(np.asarray(Image.open(image.document.path)).copy())
            (expected,) = PROCESSOR.process(pixels, planned.plan)
            assert torch.equal(load(processed.patches[0]).pixels, expected.pixels)
            assert processed.patches[0].layout == expected.layout

    asyncio.run(run())


def test_a_picture_seen_twice_is_processed_once(pool: PreprocessPool, tmp_path: Path) -> None:
    image = picture(tmp_path, 2)
    before = pool.stats.num_images

    async def run() -> None:
        first, twin = await process(pool, image, image)
        (again,) = await process(pool, image)
        at_once = await asyncio.gather(*(process(pool, picture(tmp_path, 3)) for _ in range(4)))
        assert first is twin is again
        assert len({id(processed) for (processed,) in at_once}) == 1

    asyncio.run(run())
    assert pool.stats.num_images == before + 2
    assert pool.stats.seconds > 0


def test_other_limits_are_other_patches(pool: PreprocessPool, tmp_path: Path) -> None:
    image = picture(tmp_path, 4)

    async def run() -> tuple[int, int]:
        (large,), (small,) = await process(pool, image), await process(pool, image, limits=PixelLimits(None, 3000))
        return large.plan.num_tokens, small.plan.num_tokens

    large, small = asyncio.run(run())
    assert small < large


def test_a_ceiling_lowers_and_never_raises_what_the_checkpoint_takes(pool: PreprocessPool, tmp_path: Path) -> None:
    image = picture(tmp_path, 5, 600, 600)

    async def tokens(limits: PixelLimits) -> int:
        return (await pool.plan(image, limits)).plan.num_tokens

    own = asyncio.run(tokens(PixelLimits()))
    assert asyncio.run(tokens(PixelLimits().or_auto())) == own
    assert asyncio.run(tokens(PixelLimits(None, AUTO_PIXELS))) > own
    assert asyncio.run(tokens(PixelLimits(None, 20_000, is_ceiling=True))) < own


def test_auto_bounds_tokens_where_a_checkpoint_does_not() -> None:
    generous = replace(PROCESSOR, max_pixels=12_845_056)

    def num_tokens(width: int, height: int, limits: PixelLimits) -> int:
        return plan_image(generous, width, height, limits).num_tokens

    assert num_tokens(4000, 3000, PixelLimits()) > 15_000
    assert num_tokens(4000, 3000, PixelLimits().or_auto()) <= AUTO_TOKENS
    assert num_tokens(1240, 1754, PixelLimits().or_auto()) == num_tokens(1240, 1754, PixelLimits())
    assert num_tokens(4000, 3000, PixelLimits().low_detail()) < 400


@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_a_picture_is_measured_upright(pool: PreprocessPool, tmp_path: Path, orientation: int) -> None:
    image = picture(tmp_path, 10 + orientation, 120, 40, orientation=orientation)

    async def run() -> tuple[tuple[int, int], Processed]:
        planned = await pool.plan(image, PixelLimits())
        async with pool.hold([planned]) as (processed,):
            return (planned.plan.width, planned.plan.height), processed

    size, processed = asyncio.run(run())
    assert size == ((40, 120) if orientation == 6 else (120, 40))
    assert (processed.plan.width, processed.plan.height) == size


def test_a_header_that_lies_about_the_orientation_is_planned_again(tmp_path: Path) -> None:
    """What was measured and what is decoded differ: the pixels decide."""
    image = picture(tmp_path, 20, 120, 40)
    pool = PreprocessPool(PROCESSOR, num_workers=1, capacity_bytes=10_000_000)

    async def run() -> Processed:
        planned = await pool.plan(image, PixelLimits())
        wrong = type(planned)(image, planned.limits, PROCESSOR.plan(40, 120, planned.limits))
        async with pool.hold([wrong]) as (processed,):
            return processed

    try:
        assert asyncio.run(run()).plan == PROCESSOR.plan(120, 40, PixelLimits())
    finally:
        pool.close()


@pytest.mark.parametrize("content", [b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0 nothing"])
def test_a_damaged_picture_is_an_error_that_names_it_and_is_tried_afresh(
    pool: PreprocessPool, tmp_path: Path, content: bytes
) -> None:
    image = source(tmp_path / "broken", content)
    for _ in range(2):
        with pytest.raises(DocumentError, match="broken") as caught:
            asyncio.run(process(pool, image))
        assert caught.value.code == "corrupt_document"
    assert pool.num_pinned == 0


def test_one_bad_picture_lets_go_of_the_good_ones(pool: PreprocessPool, tmp_path: Path) -> None:
    whole = picture(tmp_path, 30, 300, 300)
    cut = whole.document.path.read_bytes()
    broken = source(tmp_path / "cut.png", cut[: len(cut) // 2])
    with pytest.raises(DocumentError):
        asyncio.run(process(pool, whole, broken))
    assert pool.num_pinned == 0
    assert asyncio.run(process(pool, whole))


def test_memory_stays_within_the_capacity_over_many_pictures(tmp_path: Path) -> None:
    pool = PreprocessPool(PROCESSOR, num_workers=1, capacity_bytes=1_000_000)
    processed: list[Processed] = []

    async def run() -> None:
        for seed in range(12):
            processed.extend(await process(pool, picture(tmp_path, 100 + seed)))
            assert pool.num_bytes <= pool.capacity_bytes
            assert (SHARED_MEMORY / processed[-1].patches[0].segment).exists()

    try:
        asyncio.run(run())
        assert 1 <= len(segments(processed)) < 12
    finally:
        pool.close()
    assert segments(processed) == []
    with pytest.raises(MMServeError):
        asyncio.run(process(pool, picture(tmp_path, 99)))


def test_patches_are_taken_away_only_when_the_engine_reads_them_no_more(tmp_path: Path) -> None:
    """The engine learns that a request was given up a moment after its pictures were let go."""
    asked: list[Future[None]] = []

    def settle() -> Future[None]:
        asked.append(Future())
        if len(asked) > 1:
            asked[-1].set_result(None)
        return asked[-1]

    pool = PreprocessPool(PROCESSOR, num_workers=1, capacity_bytes=1, settle=settle)
    try:
        processed = asyncio.run(process(pool, picture(tmp_path, 60)))
        assert pool.num_bytes == 0
        assert len(segments(processed)) == 1
        asked[0].set_result(None)
        assert segments(processed) == []
    finally:
        pool.close()


def test_requests_wait_for_room_in_their_order_and_a_large_one_goes_alone() -> None:
    room = Room(100)
    log: list[str] = []

    @asynccontextmanager
    async def using(name: str, size: int) -> AsyncIterator[None]:
        async with room.taken(size):
            log.append(name)
            yield

    async def run() -> None:
        release = asyncio.Event()

        async def hold(name: str, size: int) -> None:
            async with using(name, size):
                await release.wait()

        tasks = [asyncio.create_task(hold(name, size)) for name, size in (("a", 60), ("large", 500), ("b", 10))]
        await asyncio.sleep(0.01)
        assert log == ["a"]
        tasks[1].cancel()
        await asyncio.sleep(0.01)
        assert log == ["a", "b"]
        tasks.append(asyncio.create_task(hold("huge", 900)))
        release.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert log == ["a", "b", "huge"]
        async with using("after", 100):
            pass

    asyncio.run(run())


def test_those_who_leave_together_take_no_room_with_them() -> None:
    async def run() -> None:
        room = Room(10)

        async def stay() -> None:
            async with room.taken(10):
                await asyncio.sleep(60)

        async def pass_through() -> None:
            async with room.taken(10):
                pass

        leavers = [asyncio.create_task(stay()) for _ in range(3)]
        last = asyncio.create_task(pass_through())
        await asyncio.sleep(0)
        for leaver in leavers:
            leaver.cancel()
        outcomes = await asyncio.gather(*leavers, return_exceptions=True)
        assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
        await asyncio.wait_for(last, 5)

    asyncio.run(run())


def test_who_leaves_while_a_picture_is_processed_harms_nobody(pool: PreprocessPool, tmp_path: Path) -> None:
    image = picture(tmp_path, 40, 400, 400)

    async def run() -> None:
        leaver = asyncio.create_task(process(pool, image))
        stayer = asyncio.create_task(process(pool, image))
        await until(lambda: pool.num_pinned == 1)
        leaver.cancel()
        assert await stayer
        assert leaver.cancelled() or leaver.cancelling()

    asyncio.run(run())
    assert pool.num_pinned == 0


@pytest.mark.parametrize("num_turns", [1, 2, 5])
def test_a_pool_that_is_closed_while_a_picture_is_shared_leaves_nothing_behind(num_turns: int) -> None:
    before = set(SHARED_MEMORY.iterdir())
    pool = PreprocessPool(PROCESSOR, num_workers=1, capacity_bytes=10_000_000, pixels_on="device")

    async def run() -> None:
        planned = await pool.plan(DecodedPicture(np.zeros((1000, 1000, 3), np.uint8)), PixelLimits())

        async def hold() -> None:
            async with pool.hold([planned]):
                pass

        holder = asyncio.create_task(hold())
        for _ in range(num_turns):
            await asyncio.sleep(0)
        pool.close()
        with pytest.raises(EngineError, match="closed"):
            await holder

    asyncio.run(run())
    assert set(SHARED_MEMORY.iterdir()) <= before


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


def test_a_pool_without_workers_is_refused() -> None:
    with pytest.raises(RequestError, match="num-preprocess-workers"):
        PreprocessPool(PROCESSOR, num_workers=0)


def test_bytes_of_a_reference_are_those_of_its_pixels(pool: PreprocessPool, tmp_path: Path) -> None:
    (processed,) = asyncio.run(process(pool, picture(tmp_path, 50)))
    (ref,) = processed.patches
    assert num_bytes(ref) == ref.shape[0] * ref.shape[1] * 4


def test_pictures_are_shared_within_one_salt_only(pool: PreprocessPool, tmp_path: Path) -> None:
    image = picture(tmp_path, 77)

    async def digest(salt: bytes) -> bytes:
        planned = await pool.plan(image, PixelLimits(), salt)
        async with pool.hold([planned]):
            return pool.digest(planned)

    async def run() -> tuple[list[bytes], int]:
        before = pool.stats.num_images
        digests = [await digest(salt) for salt in (b"", b"a", b"b", b"a", b"")]
        return digests, pool.stats.num_images - before

    digests, num_processed = asyncio.run(run())
    assert num_processed == len(set(digests)) == 3
    assert (digests[0], digests[1]) == (digests[4], digests[3])
    assert sum((image.digest, salt) in pool._sizes for salt in (b"", b"a", b"b")) == 3
