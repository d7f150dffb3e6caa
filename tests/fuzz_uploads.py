"""Uploads mutated documents to a server of its own, and counts what becomes of them.

    python tests/fuzz_uploads.py --count 10000 --seed 1

Prints one JSON object. Exits with 1 for an answer of status 5xx, an answer that is no
result and no error, or a sound document that is not read any more.
"""

import argparse
import base64
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent / "server"))

import httpx
import psutil
from fuzz_corpus import corpus
from fuzz_mutations import mutated
from fuzz_server import Targets

_MIB = 1024**2
_TESTS = Path(__file__).parent
_TIMEOUT_SECONDS = 200


@dataclass
class Outcome:
    """What came back for one upload; `fault` says what was wrong with it."""

    name: str
    data: bytes
    status: int
    code: str
    message: str = ""
    fault: str | None = None


@dataclass
class Tally:
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[Outcome] = field(default_factory=list)
    crashes: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.outcomes[f"{outcome.status} {outcome.code}"] += 1
        if outcome.fault is not None:
            self.faults.append(outcome)
        if "reader crash" in outcome.message:
            self.crashes.append(outcome)


class Uploader:
    """Sends documents, each one as the next number of the seed says."""

    def __init__(self, where: Targets, seed: int, share_as_pictures: float = 0.4) -> None:
        self._where = where
        self._seed = seed
        self._share_as_pictures = share_as_pictures
        self._client = httpx.Client(timeout=_TIMEOUT_SECONDS)

    def upload(self, number: int) -> Outcome:
        chance = random.Random(f"{self._seed}:{number}")
        name, data = mutated(chance, corpus())
        return self.send(name, data, as_picture=chance.random() < self._share_as_pictures)

    def send(self, name: str, data: bytes, *, as_picture: bool) -> Outcome:
        response = self._ask_about(name, data) if as_picture else self._summarize(name, data)
        return _outcome(name, data, response)

    def close(self) -> None:
        self._client.close()

    def _summarize(self, name: str, data: bytes) -> httpx.Response:
        return self._client.post(f"{self._where.text_url}/v1/summarize", files={"file": (name, data)})

    def _ask_about(self, name: str, data: bytes) -> httpx.Response:
        url = "data:application/octet-stream;base64," + base64.b64encode(data).decode()
        part = {"type": "file", "file": {"file_data": url, "filename": name}}
        if not name.endswith((".pdf", ".txt")):
            part = {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
        body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
        return self._client.post(f"{self._where.vision_url}/v1/chat/completions", json=body)


def _outcome(name: str, data: bytes, response: httpx.Response) -> Outcome:
    try:
        body = response.json()
    except ValueError:
        return Outcome(name, data, response.status_code, "no JSON", fault="the answer is no JSON")
    if response.status_code == 200:
        problem = _unread_pages(body)
        return Outcome(name, data, 200, "read" if problem is None else "partly", problem or "")
    error: Mapping[str, Any] = body.get("error", {})
    code, message = error.get("code"), error.get("message", "")
    fault = None
    if not code or len(message) < 10:
        fault = "the error has no code or no sentence"
    elif response.status_code >= 500:
        fault = "the answer is a 5xx"
    return Outcome(name, data, response.status_code, str(code), message, fault)


def _unread_pages(body: Mapping[str, Any]) -> str | None:
    problems = [page["error"]["message"] for page in body.get("pages", ()) if page.get("error")]
    return "; ".join(problems) or None


@dataclass
class Watch:
    """The processes below `root`: how many have come and gone, and what they hold."""

    root: psutil.Process
    seen: set[int] = field(default_factory=set)
    samples: list[dict[str, Any]] = field(default_factory=list)

    def look(self, num_sent: int) -> None:
        children = [child for child in self.root.children(recursive=True) if "spawn_main" in _command(child)]
        self.seen.update(child.pid for child in children)
        held = sorted((_resident_mib(child) for child in children), reverse=True)
        self.samples.append(
            {
                "sent": num_sent,
                "server_mib": _resident_mib(self.root),
                "workers_mib": held,
                "server_files": self.root.num_fds(),
            }
        )


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _resident_mib(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss) // _MIB
    except psutil.Error:
        return 0


@contextmanager
def _server(*arguments: str) -> Iterator[tuple[Targets, int]]:
    """The servers in a process of their own, and its number."""
    # Not a script: each worker process would import it again.
    command = [sys.executable, "-c", "import sys, fuzz_server; fuzz_server.main(*sys.argv[1:])", *arguments]
    paths = [str(_TESTS), str(_TESTS / "server"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield Targets(**json.loads(process.stdout.readline())), process.pid
        finally:
            process.stdin.close()


def run(options: argparse.Namespace) -> dict[str, Any]:
    arguments = (options.ocr, str(options.workers), str(options.page_timeout))
    with _server(*arguments) as (where, pid):
        tally, watch = Tally(), Watch(psutil.Process(pid))
        is_alive = _upload_all(options, Uploader(where, options.seed, options.share_as_pictures), tally, watch)
    _keep(options.keep, tally)
    return {
        "count": options.count,
        "seed": options.seed,
        "ocr": options.ocr,
        "outcomes": dict(sorted(tally.outcomes.items())),
        "num_5xx": sum(number for key, number in tally.outcomes.items() if key >= "5"),
        "faults": [f"{one.name}: {one.status} {one.code}: {one.fault}: {one.message}" for one in tally.faults],
        "crashes": [one.name for one in tally.crashes],
        "worker_processes": len(watch.seen),
        "is_alive": is_alive,
        "memory": watch.samples,
    }


def _upload_all(options: argparse.Namespace, uploader: Uploader, tally: Tally, watch: Watch) -> bool:
    """Whether sound documents are still read afterwards."""
    with closing(uploader), ThreadPoolExecutor(options.at_once) as threads:
        for start in range(0, options.count, options.every):
            numbers = range(start, min(start + options.every, options.count))
            for outcome in threads.map(uploader.upload, numbers):
                tally.add(outcome)
            watch.look(numbers.stop)
            print(f"{numbers.stop} {dict(tally.outcomes)} {watch.samples[-1]}", file=sys.stderr, flush=True)
        sound = corpus()["plain.pdf"]
        return all(uploader.send("sound.pdf", sound, as_picture=way).status == 200 for way in (False, True))


def _keep(folder: Path | None, tally: Tally) -> None:
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    for number, outcome in enumerate([*tally.faults, *tally.crashes]):
        (folder / f"{number:04}-{outcome.name}").write_bytes(outcome.data)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ocr", default="off", choices=("auto", "off", "tesseract", "rapidocr"))
    parser.add_argument("--workers", type=int, default=2, help="page workers")
    parser.add_argument("--page-timeout", type=float, default=60.0, help="seconds for one page")
    parser.add_argument("--at-once", type=int, default=3, help="uploads under way at the same time")
    parser.add_argument("--share-as-pictures", type=float, default=0.4, help="of the uploads, in chat requests")
    parser.add_argument("--every", type=int, default=250, help="memory is looked at after so many uploads")
    parser.add_argument("--keep", type=Path, help="a folder for the documents that had a fault or crashed a worker")
    result = run(parser.parse_args())
    print(json.dumps(result, indent=2))
    return int(bool(result["faults"]) or not result["is_alive"])


if __name__ == "__main__":
    sys.exit(main())
