"""Jobs as rows, and rows as jobs."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, select

from mmserve.jobs.records import Job, JobFile
from mmserve.jobs.tables import job_files, jobs

_JOB_FIELDS = (
    "id",
    "owner",
    "task",
    "options",
    "status",
    "created_at",
    "expires_at",
    "started_at",
    "finished_at",
    "no_cache",
    "error",
    "webhook_url",
)
_FILE_FIELDS = ("file_id", "filename", "sha256", "status", "num_pages", "num_pages_read", "error")


def find_job(connection: Connection, owner: str, job_id: str) -> Job | None:
    """With its results, if it has ended."""
    row = connection.execute(select(jobs).where(jobs.c.owner == owner, jobs.c.id == job_id)).one_or_none()
    return None if row is None else full_job(connection, row)


def full_job(connection: Connection, row: Row[Any]) -> Job:
    query = select(job_files).where(job_files.c.job_id == row.id).order_by(job_files.c.index)
    rows = connection.execute(query).all()
    job = _as_job(row, [_as_file(file) for file in rows])
    return _as_job(row, job.files, [_result_of(file) for file in rows]) if job.has_ended else job


def jobs_without_results(connection: Connection, rows: Sequence[Row[Any]]) -> list[Job]:
    columns = [job_files.c[name] for name in ("job_id", *_FILE_FIELDS)]
    query = select(*columns).where(job_files.c.job_id.in_([row.id for row in rows]))
    files: dict[str, list[JobFile]] = defaultdict(list)
    for file in connection.execute(query.order_by(job_files.c.job_id, job_files.c.index)):
        files[file.job_id].append(_as_file(file))
    return [_as_job(row, files[row.id]) for row in rows]


def _as_job(row: Row[Any], files: Sequence[JobFile], results: Sequence[dict[str, Any]] | None = None) -> Job:
    return Job(**{name: row._mapping[name] for name in _JOB_FIELDS}, files=tuple(files), results=results)


def _as_file(row: Row[Any]) -> JobFile:
    return JobFile(**{name: row._mapping[name] for name in _FILE_FIELDS})


def _result_of(row: Row[Any]) -> dict[str, Any]:
    """A file that a cancelled job did not come to has neither result nor error."""
    return row.result if row.result is not None else {"name": row.filename, "error": row.error}
