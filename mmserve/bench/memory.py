"""Memory of this process and of all that it started."""

import contextlib
import threading
from collections.abc import Callable, Collection

import psutil

# On Linux a sample of a process of 1 GiB takes 3 to 10 ms, in which the engine can allocate nothing: four a second took
# 8% off a stream on two cores.
SAMPLING_SECONDS = 1.0


def process_tree_bytes(excluded_pids: Collection[int] = ()) -> int:
    """Resident bytes of this process and its descendants, without `excluded_pids` and theirs.

    Where the system tells (Linux), memory that n processes share counts as one nth in each.
    """
    return _tree_bytes(psutil.Process(), frozenset(excluded_pids))


def private_tree_bytes() -> int:
    """Data of this process and its descendants that no file backs, whoever else uses the same libraries.

    The share of a library's pages in `process_tree_bytes` changes when another program that uses it starts or ends.
    """
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    total = 0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += _private_bytes(process)
    return total


def _private_bytes(process: psutil.Process) -> int:
    if psutil.LINUX:
        return sum(int(area.anonymous) for area in process.memory_maps())
    return int(process.memory_full_info().uss)


def _tree_bytes(process: psutil.Process, excluded_pids: frozenset[int]) -> int:
    total = 0
    with contextlib.suppress(psutil.Error):
        total = _resident_bytes(process)
        children = [child for child in process.children() if child.pid not in excluded_pids]
        total += sum(_tree_bytes(child, excluded_pids) for child in children)
    return total


def _resident_bytes(process: psutil.Process) -> int:
    return int(process.memory_full_info().pss if psutil.LINUX else process.memory_info().rss)


class MemoryWatcher:
    """Samples `process_tree_bytes` in a thread from entering to leaving; `peak_bytes` is the most that was seen."""

    def __init__(
        self, excluded_pids: Collection[int] = (), *, measure: Callable[[Collection[int]], int] = process_tree_bytes
    ) -> None:
        self.peak_bytes = 0
        self._excluded_pids = excluded_pids
        self._measure = measure
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-watcher", daemon=True)

    def __enter__(self) -> "MemoryWatcher":
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._sample()

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLING_SECONDS):
            self._sample()

    def _sample(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self._measure(self._excluded_pids))
