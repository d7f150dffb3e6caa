"""What a person sees on standard error while documents are worked on: a bar with the time left, notes, failures."""

import contextlib
import logging
import sys
import unicodedata
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

BAR_TITLE = "Documents"


def show_log(*, verbose: bool) -> None:
    """Send the package's log to standard error: everything with `verbose`, else warnings."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr, force=True)
    logging.getLogger("mmserve").setLevel(logging.DEBUG if verbose else logging.WARNING)


class Display:
    """A progress bar where standard error is a terminal, and one line for each note. `quiet` leaves failures alone."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._console = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
        columns: list[Any] = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
        columns += [TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()]
        self._progress = Progress(
            *columns,
            console=self._console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            disable=quiet or not self.is_live,
        )
        self._task: Any = None

    @property
    def is_live(self) -> bool:
        return self._console.is_terminal

    def __enter__(self) -> "Display":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def expect(self, num_documents: int) -> None:
        self._task = self._progress.add_task(BAR_TITLE, total=num_documents)

    def advance(self) -> None:
        self._progress.advance(self._task)

    def describe(self, text: str) -> None:
        self._progress.update(self._task, description=printable(text))

    def note(self, text: str) -> None:
        if not self._quiet:
            self.error(text)

    def error(self, text: str) -> None:
        self._console.print(printable(text))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The bar is off the screen meanwhile: standard output may be the same terminal."""
        self._progress.stop()
        try:
            yield
        finally:
            self._progress.start()


def printable(text: str) -> str:
    """Without control characters, which could steer the terminal: names and contents of files are other people's."""
    return "".join("\ufffd" if unicodedata.category(char) == "Cc" and char not in "\n\t" else char for char in text)
