"""Offers a server of its own several times the load that it can carry, and counts what becomes of it.

    python tests/overload.py --seconds 300 --factor 5

Chat (streamed) and documents (`POST /v1/summarize`) in random order, at random moments. Prints one JSON object. Exits
with 1 for a request that got neither a whole answer nor status 429, or a queue above its bound.
"""

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from reference_models import save_reference_model
from served_process import ServedProcess, served_process

Kind = Literal["chat", "document"]
_TIMEOUT_SECONDS = 300
# Large enough for the engine, and not what is around it, to set the capacity.
_MODEL: Mapping[str, Any] = {
    "max_position_embeddings": 8192,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
}
_LOOK_SECONDS = 2
_WORDS = ("the", "invoice", "of", "March", "is", "due", "in", "June", "its", "total", "includes", "tax", "as", "agreed")


@dataclass(frozen=True)
class Load:
    """What is sent: the share of documents, and the sizes of answers in tokens."""

    share_of_documents: float = 0.2
    chat_tokens: int = 64
    document_tokens: int = 48


@dataclass(frozen=True)
class Outcome:
    """What one request got; times are seconds from the start of the run, or from when it was sent."""

    kind: Kind
    sent_at: float
    status: int
    seconds: float
    first_token: float | None = None
    is_whole: bool = False
    problem: str = ""

    @property
    def is_lost(self) -> bool:
        return not (self.status == 200 and self.is_whole) and self.status != 429


class Sender:
    """Each request has words and a connection of its own, so that no cache answers it, and no pool here holds it up."""

    def __init__(self, url: str, load: Load) -> None:
        self._host, _, port = url.removeprefix("http://").partition(":")
        self._port = int(port)
        self._load = load
        self._random = random.Random(1)
        self._started = time.perf_counter()

    def begin(self) -> None:
        self._started = time.perf_counter()

    async def send(self) -> Outcome:
        kind: Kind = "document" if self._random.random() < self._load.share_of_documents else "chat"
        text = " ".join(self._random.choices(_WORDS, k=40))
        request = self._chat(text) if kind == "chat" else self._summary(text)
        sent = time.perf_counter()
        status, first, body, problem = 0, None, b"", ""
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                status, first, body = await self._exchange(request)
        except (OSError, ValueError, EOFError, TimeoutError) as error:
            problem = f"{type(error).__name__}: {error}"
        ended = time.perf_counter()
        is_whole = status == 200 and (b"data: [DONE]" in body if kind == "chat" else b'"object":"summary"' in body)
        if status != 200 and body:
            problem = str(json.loads(body)["error"]["code"])
        elif not problem and not is_whole:
            problem = body[-300:].decode(errors="replace")
        first_token = first - sent if first is not None and kind == "chat" and is_whole else None
        return Outcome(kind, sent - self._started, status, ended - sent, first_token, is_whole, problem)

    async def _exchange(self, request: bytes) -> tuple[int, float | None, bytes]:
        """Status, when the body began, and the body as it came over the line."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(request)
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            begin = await reader.read(65536)
            first = time.perf_counter()
            rest = await reader.read()
        finally:
            writer.close()
        return int(head.split()[1]), first, begin + rest

    def _chat(self, text: str) -> bytes:
        fields = {"max_tokens": self._load.chat_tokens, "ignore_eos": True, "stream": True}
        body = json.dumps({"messages": [{"role": "user", "content": text}], **fields}).encode()
        return self._post("/v1/chat/completions", "application/json", body)

    def _summary(self, text: str) -> bytes:
        fields = {"max_tokens": str(self._load.document_tokens), "no_cache": "true", "temperature": "0"}
        parts = [f'Content-Disposition: form-data; name="{name}"\r\n\r\n{value}' for name, value in fields.items()]
        parts.append(f'Content-Disposition: form-data; name="file"; filename="note.txt"\r\n\r\n{text}')
        body = "".join(f"--part\r\n{one}\r\n" for one in parts) + "--part--\r\n"
        return self._post("/v1/summarize", "multipart/form-data; boundary=part", body.encode())

    def _post(self, path: str, media_type: str, body: bytes) -> bytes:
        lines = (
            f"POST {path} HTTP/1.1",
            f"Host: {self._host}:{self._port}",
            "Connection: close",
            f"Content-Type: {media_type}",
            f"Content-Length: {len(body)}",
        )
        return "\r\n".join((*lines, "", "")).encode() + body


@dataclass
class Watch:
    """Looks at the server every few seconds."""

    served: ServedProcess
    samples: list[dict[str, Any]] = field(default_factory=list)

    @asynccontextmanager
    async def looking(self) -> AsyncIterator[None]:
        started = time.perf_counter()

        async def look() -> None:
            while True:
                at = time.perf_counter() - started
                self.samples.append({"at": at, **await asyncio.to_thread(self._look)})
                await asyncio.sleep(_LOOK_SECONDS)

        task = asyncio.create_task(look())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    def _look(self) -> dict[str, Any]:
        return {
            "waiting": self.served.metric("mmserve_num_requests_waiting"),
            "running": self.served.metric("mmserve_num_requests_running"),
            "memory": self.served.memory_mib(),
        }

    def memory(self, start: float, end: float) -> dict[str, float]:
        """The median of each kind of process, in MiB."""
        chosen = [sample["memory"] for sample in self.samples if start <= sample["at"] < end]
        kinds = sorted({kind for memory in chosen for kind in memory})
        return {kind: round(statistics.median(memory.get(kind, 0.0) for memory in chosen), 1) for kind in kinds}


async def measure_capacity(sender: Sender, num_at_once: int, seconds: float) -> float:
    """Requests a second where as many as the engine takes at once are always under way."""
    end = time.perf_counter() + seconds

    async def send_on() -> int:
        num_done = 0
        while time.perf_counter() < end:
            outcome = await sender.send()
            num_done += outcome.status == 200
        return num_done

    started = time.perf_counter()
    counts = await asyncio.gather(*(send_on() for _ in range(num_at_once)))
    return sum(counts) / (time.perf_counter() - started)


async def offer(sender: Sender, rate: float, seconds: float) -> list[Outcome]:
    """All that is sent at this rate, whatever has become of what went before."""
    arrivals, moment, tasks = random.Random(2), 0.0, []
    sender.begin()
    started = time.perf_counter()
    while moment < seconds:
        await asyncio.sleep(started + moment - time.perf_counter())
        tasks.append(asyncio.create_task(sender.send()))
        moment += arrivals.expovariate(rate)
    return await asyncio.gather(*tasks)


def percentiles_ms(values: Iterable[float]) -> dict[str, float] | None:
    ordered = sorted(values)
    if not ordered:
        return None
    at = {name: ordered[min(int(share * len(ordered)), len(ordered) - 1)] for name, share in _SHARES.items()}
    return {name: round(value * 1000, 1) for name, value in at.items()} | {"count": len(ordered)}


_SHARES = {"p50": 0.5, "p99": 0.99, "max": 1.0}


def part(outcomes: list[Outcome], start: float, end: float) -> dict[str, Any]:
    """What became of the requests that were sent in these seconds."""
    sent = [one for one in outcomes if start <= one.sent_at < end]
    done = [one for one in sent if one.status == 200]
    return {
        "offered_per_second": round(len(sent) / (end - start), 1),
        "accepted_per_second": round(len(done) / (end - start), 1),
        "accepted": dict(Counter(one.kind for one in done)),
        "rejected": dict(Counter(one.kind for one in sent if one.status == 429)),
        "rejection_ms": percentiles_ms(one.seconds for one in sent if one.status == 429),
        "chat_first_token_ms": percentiles_ms(one.first_token for one in done if one.first_token is not None),
        "document_ms": percentiles_ms(one.seconds for one in done if one.kind == "document"),
    }


async def drive(served: ServedProcess, options: argparse.Namespace, load: Load) -> dict[str, Any]:
    sender, watch = Sender(served.url, load), Watch(served)
    # The first time is for warming up.
    for _ in range(2):
        capacity = await measure_capacity(sender, options.max_num_seqs, options.capacity_seconds)
    rate = options.factor * capacity
    print(f"capacity {capacity:.1f}/s, offered {rate:.1f}/s", file=sys.stderr, flush=True)
    async with watch.looking():
        outcomes = await offer(sender, rate, options.seconds)
    afterwards = await sender.send()
    window = min(60.0, options.seconds / 3)
    parts = {"first": (0.0, window), "last": (options.seconds - window, options.seconds), "all": (0.0, options.seconds)}
    lost = [one for one in [*outcomes, afterwards] if one.is_lost]
    return {
        "seconds": options.seconds,
        "capacity_per_second": round(capacity, 1),
        "factor": options.factor,
        "outcomes": dict(Counter(f"{one.kind} {one.status} {one.problem}".strip() for one in outcomes)),
        "num_lost": len(lost),
        "lost": [asdict(one) for one in itertools.islice(lost, 20)],
        "is_answered_afterwards": afterwards.status == 200,
        "memory_every_30_s": [sample["memory"] for sample in watch.samples[:: 30 // _LOOK_SECONDS]],
        "max_waiting": max(sample["waiting"] for sample in watch.samples),
        "bound_of_waiting": options.max_num_waiting,
        "window_seconds": window,
        **{f"{name}_window" if name != "all" else "all": part(outcomes, *span) for name, span in parts.items()},
        "memory_mib": {name: watch.memory(*span) for name, span in parts.items() if name != "all"},
        "memory_after_mib": served.memory_mib(),
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="overload-") as folder:
        model = save_reference_model("llama", Path(folder) / "model", **_MODEL)
        limits = ("--max-num-seqs", str(options.max_num_seqs), "--max-num-waiting", str(options.max_num_waiting))
        engine = ("--model", str(model), "--num-threads", "1", "--kv-cache-memory-bytes", "64MiB")
        with served_process(*engine, *limits, "--data-dir", f"{folder}/data") as served:
            served.wait_until_ready()
            return asyncio.run(drive(served, options, Load(options.share_of_documents)))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--factor", type=float, default=5.0, help="times the measured capacity")
    parser.add_argument("--capacity-seconds", type=float, default=15.0, help="for measuring the capacity")
    parser.add_argument("--share-of-documents", type=float, default=0.2, help="the others are chat")
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--max-num-waiting", type=int, default=32)
    return parser.parse_args(arguments)


def main() -> int:
    result = run(parse())
    print(json.dumps(result, indent=2))
    return int(bool(result["num_lost"]) or result["max_waiting"] > result["bound_of_waiting"])


if __name__ == "__main__":
    sys.exit(main())
