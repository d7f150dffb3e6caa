"""Broken documents, uploaded: each gets a result or an error with a stable code, and the service goes on."""

import io
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import get_args

import pytest
from broken_pictures import cut_before_last_frame_data, with_transparency
from fuzz_corpus import corpus
from fuzz_mutations import mutated
from fuzz_server import Targets, targets
from fuzz_uploads import Outcome, Uploader
from PIL import Image

from mmserve.errors import ErrorCode

_NUM_UPLOADS = 300


@pytest.fixture(scope="module")
def where() -> Iterator[Targets]:
    with targets(ocr="off", num_workers=2, page_timeout=20) as running:
        yield running


@pytest.fixture
def uploader(where: Targets) -> Iterator[Uploader]:
    with closing(Uploader(where, seed=20)) as ready:
        yield ready


def faults(outcomes: list[Outcome]) -> list[str]:
    return [f"{one.name}: {one.status} {one.code} {one.fault} {one.message}" for one in outcomes if one.fault]


def test_the_corpus_and_its_mutations_are_the_same_each_time() -> None:
    first = dict(corpus())
    corpus.cache_clear()
    assert corpus() == first
    again = [mutated(random.Random(7), first) for _ in range(2)]
    assert again[0] == again[1]


def test_what_is_sound_is_read(uploader: Uploader) -> None:
    outcomes = [
        uploader.send(name, data, as_picture=not name.endswith((".pdf", ".txt"))) for name, data in corpus().items()
    ]
    # A scan takes OCR, which is off here.
    assert {one.name: one.code for one in outcomes if one.status != 200} == {"scan.pdf": "empty_document"}


def test_mutated_uploads_get_a_result_or_a_stable_error_and_no_worker_is_lost(uploader: Uploader) -> None:
    with ThreadPoolExecutor(3) as threads:
        outcomes = list(threads.map(uploader.upload, range(_NUM_UPLOADS)))
    assert faults(outcomes) == []
    codes = Counter(one.code for one in outcomes)
    assert set(codes) <= {"read", "partly", *get_args(ErrorCode)}
    assert codes["read"] > 0.1 * _NUM_UPLOADS
    assert codes["corrupt_document"] > 0.1 * _NUM_UPLOADS
    for as_picture in (False, True):
        sound = uploader.send("sound.pdf", corpus()["plain.pdf"], as_picture=as_picture)
        assert (sound.status, sound.code) == (200, "read"), sound.message


def regressions() -> dict[str, bytes]:
    sound = corpus()
    palette = io.BytesIO()
    Image.new("P", (8, 8)).save(palette, "PNG")
    return {
        "second_frame.gif": cut_before_last_frame_data(sound["a.gif"]),
        "palette.png": with_transparency(palette.getvalue(), b"\xff" * 300 + b"\0"),
    }


@pytest.mark.parametrize("name", ["second_frame.gif", "palette.png"])
@pytest.mark.parametrize("as_picture", [False, True])
def test_what_once_broke_a_reader(
    uploader: Uploader, name: str, as_picture: bool, caplog: pytest.LogCaptureFixture
) -> None:
    outcome = uploader.send(name, regressions()[name], as_picture=as_picture)
    assert (outcome.status, outcome.code) == (422, "corrupt_document")
    assert "page worker failed" not in caplog.text
