"""`mmserve serve` as a process of its own, and the memory of the processes that it has, by what they are for."""

import os
import re
import subprocess
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

MIB = 1024**2
_COMMAND = [sys.executable, "-c", "from mmserve.cli import main; main()", "serve", "--port", "0"]
_START_SECONDS = 120


class ServedProcess:
    """Its address, its processes, and the last lines that it logged."""

    def __init__(self, arguments: tuple[str, ...], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [*_COMMAND, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        self.root = psutil.Process(self._process.pid)
        self._http = httpx.Client(timeout=60, trust_env=False, headers={"Connection": "close"})
        self._kinds: dict[int, str] = {}
        self.log: deque[str] = deque(maxlen=2000)
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith("Listening on "):
            self.end()
            raise RuntimeError("the server did not start:\n" + "".join(self.log))
        self.url = line.split()[2]

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while self._http.get(f"{self.url}/ready").status_code != 200:
            if time.monotonic() > deadline:
                raise RuntimeError("the server was not ready in time:\n" + "".join(self.log))
            time.sleep(0.05)

    def processes(self) -> dict[str, list[psutil.Process]]:
        """The server, its engine, its preprocess workers and its page workers; one that has just gone is left out."""
        found = defaultdict(list, server=[self.root])
        for child in sorted(self.root.children(), key=lambda child: child.pid):
            try:
                if child.pid not in self._kinds:
                    self._kinds[child.pid] = self._kind_of(child)
                found[self._kinds[child.pid]].append(child)
            except (psutil.Error, OSError):
                continue
        return dict(found)

    def _kind_of(self, child: psutil.Process) -> str:
        if "spawn_main" not in " ".join(child.cmdline()):
            return "others"
        # The engine is started first, and both it and preprocessing have torch.
        if "libtorch_cpu" not in Path(f"/proc/{child.pid}/maps").read_text():
            return "page_workers"
        return "preprocess_workers" if "engine" in self._kinds.values() else "engine"

    def memory_mib(self) -> dict[str, float]:
        """Proportional set sizes: what processes share is counted once."""
        return {kind: round(sum(map(_pss_mib, those)), 1) for kind, those in self.processes().items()}

    def metric(self, name: str) -> float:
        text = self._http.get(f"{self.url}/metrics").text
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))

    def end(self, *, seconds: float = 40.0) -> int:
        """SIGTERM, and SIGKILL where that takes too long; the exit code."""
        self._process.terminate()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._reader.join()
        self._http.close()
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()
        return self._process.wait()

    def _read_log(self) -> None:
        assert self._process.stderr is not None
        self.log.extend(self._process.stderr)


def _pss_mib(process: psutil.Process) -> float:
    try:
        return float(process.memory_full_info().pss) / MIB
    except psutil.Error:
        return 0.0


@contextmanager
def served_process(*arguments: str, environment: Mapping[str, str] | None = None) -> Iterator[ServedProcess]:
    served = ServedProcess(arguments, environment or {})
    try:
        yield served
    finally:
        served.end()
