"""Pictures that the engine itself scales and cuts: the same patches, each picture once, and decoded ones as well."""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from picture_samples import load as load_processor
from picture_samples import picture
from PIL import Image
from test_preprocess_pool import PROCESSOR, SHARED_MEMORY, source

from mmserve.errors import MMServeError
from mmserve.request import ImageSpan
from mmserve.vision.decoded_picture import DecodedPicture, PictureSource
from mmserve.vision.image_plan import ImagePlan, ImageProcessor, settings_digest
from mmserve.vision.image_source import PixelLimits
from mmserve.vision.patches import PixelPatches, load, num_bytes, share, unlink
from mmserve.vision.picture_ref import PictureRef, share_picture
from mmserve.vision.pixel_loader import PixelLoader
from mmserve.vision.preprocess_pool import PreprocessPool
from mmserve.vision.preprocess_worker import PixelsOn, Processed

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Counting:
    """A processor, and how often it has processed a picture."""

    processor: ImageProcessor
    plans: list[ImagePlan]

    def process(self, image: torch.Tensor, plan: ImagePlan) -> list[PixelPatches]:
        self.plans.append(plan)
        return self.processor.process(image, plan)


def spans(processed: Processed) -> list[ImageSpan]:
    return [ImageSpan(0, 1, b"", None, ref) for ref in processed.patches]


def pool(pixels_on: PixelsOn) -> PreprocessPool:
    return PreprocessPool(PROCESSOR, num_workers=1, capacity_bytes=10_000_000, pixels_on=pixels_on)


def patches_of(pool: PreprocessPool, image: PictureSource) -> tuple[Processed, list[PixelPatches]]:
    async def run() -> tuple[Processed, list[PixelPatches]]:
        async with pool.hold([await pool.plan(image, PixelLimits())]) as (processed,):
            return processed, PixelLoader(PROCESSOR, CPU).load(spans(processed))

    return asyncio.run(run())


@pytest.fixture
def image(tmp_path: Path) -> Image.Image:
    return picture((161, 184))


@pytest.fixture
def png(image: Image.Image, tmp_path: Path) -> PictureSource:
    image.save(tmp_path / "picture.png")
    return source(tmp_path / "picture.png", (tmp_path / "picture.png").read_bytes())


def test_every_way_gives_the_same_patches(image: Image.Image, png: PictureSource) -> None:
    pixels = torch.from_numpy(np.array(image))
    (expected,) = PROCESSOR.process(pixels, PROCESSOR.plan(161, 184, PixelLimits()))
    segments = []
    for place in ("worker", "device"):
        with closing(pool(place)) as ways:
            for picture_source in (png, DecodedPicture(image)):
                processed, (found,) = patches_of(ways, picture_source)
                assert torch.equal(found.pixels, expected.pixels), place
                assert found.layout == expected.layout
                segments += [ref.segment for ref in processed.patches]
                assert ways.num_bytes == sum(map(num_bytes, processed.segments)) * (
                    1 + isinstance(picture_source, DecodedPicture)
                )
            assert ways.stats.num_images == 2
            assert ways.stats.seconds > 0
    assert not [name for name in segments if (SHARED_MEMORY / name).exists()]


def test_the_device_gets_bytes_and_the_worker_gives_floats(png: PictureSource) -> None:
    with closing(pool("worker")) as workers, closing(pool("device")) as device:
        (patches,) = patches_of(workers, png)[0].patches
        (pixels,) = patches_of(device, png)[0].patches
    assert (pixels.shape, pixels.dtype, num_bytes(pixels)) == ((184, 161, 3), "uint8", 184 * 161 * 3)
    assert patches.dtype == "float32"
    assert isinstance(pixels, PictureRef)


def test_a_decoded_picture_seen_twice_is_shared_once(image: Image.Image) -> None:
    with closing(pool("device")) as device:
        first, _ = patches_of(device, DecodedPicture(image))
        again, _ = patches_of(device, DecodedPicture(np.array(image)))
        assert first is again
        assert device.stats.num_images == 1
        assert device._workers._pool is None, "no process has started"


def test_a_closed_pool_says_so(image: Image.Image) -> None:
    device = pool("device")
    device.close()
    with pytest.raises(MMServeError) as caught:
        patches_of(device, DecodedPicture(image))
    assert caught.value.code == "shutting_down"


def test_where_pictures_are_scaled_is_part_of_their_identity() -> None:
    assert settings_digest(PROCESSOR) == settings_digest(PROCESSOR, "cpu") != settings_digest(PROCESSOR, "cuda")
    here, there = pool("worker"), PreprocessPool(PROCESSOR, pixels_on="device", device_type="cuda")
    with closing(here), closing(there):
        assert here._settings_digest != there._settings_digest


@pytest.fixture(scope="module")
def tiles() -> ImageProcessor:
    settings = {"size": {"longest_edge": 1456}, "max_image_size": {"longest_edge": 364}}
    return load_processor(
        {"model_type": "idefics3", "image_token_id": 9, "vision_config": {"patch_size": 14}}, settings
    )


@pytest.fixture
def shared(tiles: ImageProcessor) -> Iterator[tuple[PictureRef, ...]]:
    refs = share_picture(np.array(picture((300, 200))), tiles.plan(300, 200, PixelLimits()))
    yield refs
    unlink(refs[0])


def test_the_tiles_of_a_picture_are_cut_once(tiles: ImageProcessor, shared: tuple[PictureRef, ...]) -> None:
    """Whether they are asked for at once, or in the steps that have room for them."""
    assert len(shared) > 3
    expected = tiles.process(load(shared[0]).pixels, shared[0].plan)
    all_spans = [ImageSpan(0, 1, b"", None, ref) for ref in shared]
    for steps in ([all_spans], [all_spans[:2], all_spans[2:]], [[span] for span in all_spans]):
        counting = Counting(tiles, [])
        loader = PixelLoader(counting, CPU)  # type: ignore[arg-type]
        found = [patches for step in steps for patches in loader.load(step)]
        assert all(torch.equal(a.pixels, b.pixels) for a, b in zip(found, expected, strict=True))
        assert len(counting.plans) == 1
        assert not loader._waiting


def test_a_tile_may_be_asked_for_again_and_few_pictures_wait(
    tiles: ImageProcessor, shared: tuple[PictureRef, ...]
) -> None:
    loader, span = PixelLoader(tiles, CPU), ImageSpan(0, 1, b"", None, shared[1])
    first, again = loader.load([span]) + loader.load([span])
    assert torch.equal(first.pixels, again.pixels)
    others = [share_picture(np.array(picture((300, 200))), shared[0].plan) for _ in range(3)]
    for refs in others:
        loader.load([ImageSpan(0, 1, b"", None, refs[0])])
        unlink(refs[0])
    assert set(loader._waiting) == {refs[0].segment for refs in others[1:]}


def test_patches_from_a_worker_are_taken_as_they_are() -> None:
    ref = share(PixelPatches(torch.arange(6.0).view(2, 3), (1, 2)))
    (found,) = PixelLoader(None, CPU).load([ImageSpan(0, 1, b"", None, ref), ImageSpan(0, 1, b"")])
    unlink(ref)
    assert torch.equal(found.pixels, torch.arange(6.0).view(2, 3))
    assert found.layout == (1, 2)


def test_a_blank_picture_has_the_pieces_of_its_size(tiles: ImageProcessor) -> None:
    plan = tiles.plan(300, 200, PixelLimits())
    pieces = PixelLoader(tiles, CPU).blank(300, 200)
    assert len(pieces) == len(plan.items)
    assert pieces[0].pixels.std() == 0


def test_a_page_of_d1_has_2772_tokens() -> None:
    """With what Qwen2.5-VL is published with, and at least that many pixels allowed."""
    published = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 12845056}
    processor = load_processor({"model_type": "qwen2_5_vl", "vision_config": {}}, published)
    for limits in (PixelLimits(), PixelLimits(None, 12_845_056)):
        plan = processor.plan(1240, 1754, limits)
        assert (plan.num_tokens, plan.items[0].grid) == (2772, (63, 44))


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(1240, 1754), (26, 28), (3000, 200)], ids=str)
def test_a_gpu_cuts_as_a_cpu_does(size: tuple[int, int]) -> None:
    plan = PROCESSOR.plan(*size, PixelLimits())
    refs = share_picture(np.array(picture(size)), plan)
    span = [ImageSpan(0, 1, b"", None, refs[0])]
    [on_gpu], [on_cpu] = (PixelLoader(PROCESSOR, torch.device(kind)).load(span) for kind in ("cuda", "cpu"))
    unlink(refs[0])
    assert torch.equal(on_gpu.pixels.cpu(), on_cpu.pixels)
