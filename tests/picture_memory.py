"""Shows a server of its own pictures of ever new sizes, and looks at the memory of each kind of process.

    python tests/picture_memory.py --count 4000 --every 500

Prints one JSON object. The caches are small, so that they are full soon; from then on memory should be flat.
"""

import argparse
import base64
import json
import random
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from served_process import served_process
from vision_checkpoint import picture_bytes, save_vision_model

_ENGINE = ("--num-threads", "1", "--kv-cache-memory-bytes", "8MiB", "--encoder-cache-tokens", "8192")


def ask(http: httpx.Client, number: int) -> int:
    """The status of the answer to one request with a picture that no other has."""
    chance = random.Random(number)
    picture = picture_bytes(number, chance.randint(32, 640), chance.randint(32, 640), chance.choice(("PNG", "JPEG")))
    url = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
    part = {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
    body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
    return http.post("/v1/chat/completions", json=body).status_code


def run(options: argparse.Namespace) -> dict[str, Any]:
    statuses: Counter[int] = Counter()
    samples = []
    with tempfile.TemporaryDirectory(prefix="pictures-") as folder:
        model = save_vision_model(Path(folder))
        with (
            served_process(
                "--model", str(model), "--dtype", options.dtype, *_ENGINE, "--data-dir", f"{folder}/data"
            ) as served,
            httpx.Client(base_url=served.url, timeout=300, trust_env=False) as http,
            ThreadPoolExecutor(options.at_once) as threads,
        ):
            served.wait_until_ready()
            for start in range(0, options.count, options.every):
                end = min(start + options.every, options.count)
                statuses.update(threads.map(lambda number: ask(http, number), range(start, end)))
                samples.append({"sent": end, **served.memory_mib()})
                print(samples[-1], file=sys.stderr, flush=True)
    return {"count": options.count, "statuses": dict(statuses), "memory_mib": samples}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=4000)
    parser.add_argument("--every", type=int, default=500, help="memory is looked at after so many requests")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--at-once", type=int, default=3)
    print(json.dumps(run(parser.parse_args()), indent=2))


if __name__ == "__main__":
    main()
