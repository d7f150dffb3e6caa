"""A job's events in the database."""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, insert, select, update

from mmserve.jobs.records import EventName, JobEvent
from mmserve.jobs.tables import job_events, job_files, jobs

NewEvent = tuple[EventName, Mapping[str, Any]]
_BATCH_EVENTS = 200


def append_events(connection: Connection, job_id: str, events: Sequence[NewEvent]) -> None:
    """Numbers follow from the job's own count, whose row stays locked until the transaction's end."""
    if not events:
        return
    count = update(jobs).where(jobs.c.id == job_id).values(num_events=jobs.c.num_events + len(events))
    last = connection.execute(count.returning(jobs.c.num_events)).scalar_one()
    rows = [
        {"job_id": job_id, "number": number, "event": event, "data": dict(data)}
        for number, (event, data) in enumerate(events, start=last - len(events) + 1)
    ]
    connection.execute(insert(job_events), rows)


def events_after(connection: Connection, job_id: str, number: int) -> list[JobEvent]:
    """The next ones. A result is kept with its file, and put into its event here."""
    query = select(job_events).where(job_events.c.job_id == job_id, job_events.c.number > number)
    rows = connection.execute(query.order_by(job_events.c.number).limit(_BATCH_EVENTS)).all()
    return [JobEvent(row.number, row.event, _data_of(connection, job_id, row.event, row.data)) for row in rows]


def _data_of(connection: Connection, job_id: str, event: EventName, data: dict[str, Any]) -> dict[str, Any]:
    if event != "result":
        return data
    query = select(job_files.c.result).where(job_files.c.job_id == job_id, job_files.c.index == data["index"])
    return {**data, "result": connection.execute(query).scalar_one()}
