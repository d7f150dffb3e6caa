"""What a job tells while it runs: gathered for a moment, then written together, and nothing twice after a new start."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mmserve.jobs.event_log import NewEvent
from mmserve.jobs.queue import FileProgress
from mmserve.pipelines.events import DocumentOpened, Event, PageRead, stream_data

RESTARTED = "restarted"


class Teller:
    """Events of one job, not written yet. `progress` of files goes with them."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._events: list[NewEvent] = []
        self._progress: dict[int, FileProgress] = {}

    @property
    def has_news(self) -> bool:
        return bool(self._events)

    def add(self, index: int, progress: Mapping[str, Any]) -> None:
        self._events.append(("progress", self._about(index, progress)))

    def add_text(self, index: int, text: str) -> None:
        """Text that follows on the same file's text makes one event with it."""
        if self._events and self._events[-1][0] == "delta" and self._events[-1][1]["index"] == index:
            text = self._events.pop()[1]["text"] + text
        self._events.append(("delta", self._about(index, {"text": text})))

    def set_progress(self, index: int, num_pages: int, num_pages_read: int) -> None:
        self._progress[index] = FileProgress(num_pages, num_pages_read)

    def take(self) -> tuple[Sequence[NewEvent], dict[int, FileProgress]]:
        """All there is, to be written."""
        taken = self._events, self._progress
        self._events, self._progress = [], {}
        return taken

    def _about(self, index: int, data: Mapping[str, Any]) -> dict[str, Any]:
        return {"index": index, "name": self._names[index], **data}


class FileTeller:
    """Events of one file. What an earlier start has told is left out, as long as it comes out the same.

    Where the text comes out otherwise, an event `restarted` says that the text begins anew.
    """

    def __init__(self, teller: Teller, index: int) -> None:
        self._teller = teller
        self._index = index
        self._told_progress: set[str] = set()
        self._told_text = ""
        self._num_repeated = 0

    def remember(self, told: Iterable[tuple[str, dict[str, Any]]]) -> None:
        """`told` are the names and data of this file's events so far."""
        for event, data in told:
            if event == "delta":
                self._told_text += data["text"]
            elif data["event"] == RESTARTED:
                self._told_text = ""
            else:
                self._told_progress.add(_progress_key(data))

    def start_again(self) -> None:
        """The file is done once more from its beginning."""
        self._num_repeated = 0

    def finish(self) -> None:
        """The text is whole: if less of it came than was told, it is told anew."""
        if self._num_repeated < len(self._told_text):
            self._begin_anew(self._told_text[: self._num_repeated])

    def __call__(self, event: Event) -> None:
        match stream_data(event):
            case "delta", data:
                self._add_text(data["text"])
            case "progress", data:
                self._add_progress(event, data)

    def _add_progress(self, event: Event, data: Mapping[str, Any]) -> None:
        if isinstance(event, DocumentOpened):
            self._teller.set_progress(self._index, event.num_pages, 0)
        elif isinstance(event, PageRead):
            self._teller.set_progress(self._index, event.num_pages, event.num_read)
        key = _progress_key(data)
        if key not in self._told_progress:
            self._told_progress.add(key)
            self._teller.add(self._index, data)

    def _add_text(self, text: str) -> None:
        place = self._num_repeated
        repeated = self._told_text[place : place + len(text)]
        self._num_repeated = place + len(text)
        if not text.startswith(repeated):
            self._begin_anew(self._told_text[:place] + text)
        elif new := text[len(repeated) :]:
            self._told_text += new
            self._teller.add_text(self._index, new)

    def _begin_anew(self, text: str) -> None:
        self._told_text = text
        self._teller.add(self._index, {"event": RESTARTED})
        if text:
            self._teller.add_text(self._index, text)


def _progress_key(data: Mapping[str, Any]) -> str:
    return json.dumps({name: value for name, value in data.items() if name not in ("index", "name")}, sort_keys=True)
