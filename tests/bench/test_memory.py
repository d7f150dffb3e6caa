"""Memory of this process and its children, with real processes."""

import subprocess
import sys
import threading
from collections.abc import Collection, Iterator

import pytest

from mmserve.bench import memory
from mmserve.bench.memory import MemoryWatcher, private_tree_bytes, process_tree_bytes

MIB = 2**20
HOLD_MEMORY = "data = b'x' * (200 << 20); print('held', flush=True); input()"
# The child that holds the memory is a grandchild.
PASS_ON = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {HOLD_MEMORY!r}])"


@pytest.fixture(params=[HOLD_MEMORY, PASS_ON], ids=["child", "grandchild"])
def holder(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", request.param]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process


def test_descendants_count_unless_they_are_excluded(holder: subprocess.Popen[str]) -> None:
    own = process_tree_bytes([holder.pid])
    assert own > 20 * MIB
    assert 190 * MIB < process_tree_bytes() - own < 300 * MIB


def test_private_data_is_that_of_the_tree(holder: subprocess.Popen[str]) -> None:
    with_child = private_tree_bytes()
    holder.kill()
    holder.wait()
    assert 190 * MIB < with_child - private_tree_bytes() < 300 * MIB


def test_a_watcher_keeps_the_peak_between_its_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SAMPLING_SECONDS", 0.001)
    samples = iter([5, 70, 9])
    drained = threading.Event()

    def measure(excluded_pids: Collection[int]) -> int:
        assert tuple(excluded_pids) == (4,)
        sample = next(samples, None)
        if sample is None:
            drained.set()
        return sample or 1

    with MemoryWatcher([4], measure=measure) as watcher:
        assert drained.wait(10)
    assert watcher.peak_bytes == 70


def test_a_watcher_of_a_short_time_still_has_a_sample() -> None:
    with MemoryWatcher() as watcher:
        pass
    assert watcher.peak_bytes > 20 * MIB
