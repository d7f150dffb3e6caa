"""Workers that die on purpose, in processes of their own; `flag` files tell them how often they have."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from mmserve.vision.page_types import Document, Page, PageForm
from mmserve.vision.page_workers import Opened


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Mortal:
    """Reads pages as their numbers, but dies on those in `deadly`: of the first only once, of the rest each time."""

    def __init__(self, flag: Path, deadly: Sequence[int]) -> None:
        self._flag = flag
        self._deadly = deadly

    def open(self, _path: Path, _name: str, _media_type: str) -> Opened:
        return Opened(4)

    def read_without_ocr(self, _document: Document, numbers: Sequence[int], _form: PageForm) -> list[Page | None]:
        return [None] * len(numbers)

    def read_page(self, _document: Document, number: int, _form: PageForm = "text") -> Page:
        if number in self._deadly and not (number == self._deadly[0] and self._flag.exists()):
            self._flag.touch()
            die()
        return Page(number, text=f"page {number}")

    def process_id(self) -> int:
        return os.getpid()

    def close(self) -> None:
        pass


def start_never() -> Mortal:
    raise ImportError("a library of the reader is missing")


def start_at_the_second_try(flag: Path) -> Mortal:
    if not flag.exists():
        flag.touch()
        die()
    return Mortal(flag, ())
