"""A server that works on a job until it is killed: `python crash_script.py FOLDER URL`. It says what it does."""

import asyncio
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from job_fakes import CountingEngine, CountingReader, Desk, Office, document_text


def _say(line: str) -> None:
    print(line, flush=True)


async def serve(office: Office) -> None:
    async with office.service(lease_seconds=0.5) as service:
        file = await office.add(service, document_text(12))
        job, _ = await service.jobs.create("anna", "summarize", [file.id], {"length": "long"})
        _say(f"job {job.id}")
        await asyncio.Event().wait()


def main() -> None:
    reader = CountingReader(delay=0.05, on_page=lambda number: _say(f"page {number}"))
    engine = CountingEngine(delay=0.005, on_request=lambda: _say("request"))
    asyncio.run(serve(Office(Path(sys.argv[1]), sys.argv[2], desk=Desk(reader, engine))))


if __name__ == "__main__":
    main()
