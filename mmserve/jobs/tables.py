"""The database's tables. A change here needs a migration beside it: a test compares both."""

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    UniqueConstraint,
)

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    }
)

# Python's JSON escapes what is not ASCII: a NUL or half a surrogate pair could not stand in PostgreSQL's text.
_Json = JSON(none_as_null=True)

files = Table(
    "files",
    metadata,
    Column("id", String, primary_key=True),
    Column("owner", String, nullable=False),
    Column("filename", _Json, nullable=False),
    Column("media_type", String, nullable=False),
    Column("num_pages", Integer, nullable=False),
    Column("sha256", String, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
    Index(None, "owner", "id"),
    Index(None, "owner", "sha256"),
    Index(None, "expires_at"),
)

jobs = Table(
    "jobs",
    metadata,
    Column("id", String, primary_key=True),
    Column("owner", String, nullable=False),
    Column("task", String, nullable=False),
    Column("options", _Json, nullable=False),
    Column("status", String, nullable=False),
    Column("no_cache", Boolean, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("started_at", Double),
    Column("finished_at", Double),
    Column("expires_at", Double, nullable=False),
    Column("error", _Json),
    Column("webhook_url", _Json),
    Column("idempotency_key", String),
    Column("request_digest", String),
    Column("num_events", Integer, nullable=False),
    Column("num_starts", Integer, nullable=False),
    Column("claimed_by", String),
    Column("lease_until", Double),
    Index(None, "owner", "id"),
    Index(None, "status", "id"),
    Index(None, "expires_at"),
    UniqueConstraint("owner", "idempotency_key"),
)

job_files = Table(
    "job_files",
    metadata,
    Column("job_id", String, ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("index", Integer, primary_key=True, autoincrement=False),
    Column("file_id", String, nullable=False),
    Column("filename", _Json, nullable=False),
    Column("sha256", String, nullable=False),
    Column("status", String, nullable=False),
    Column("num_pages", Integer),
    Column("num_pages_read", Integer, nullable=False),
    Column("error", _Json),
    Column("result", _Json),
    Index(None, "file_id"),
)

job_events = Table(
    "job_events",
    metadata,
    Column("job_id", String, ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("event", String, nullable=False),
    Column("data", _Json, nullable=False),
)

page_texts = Table(
    "page_texts",
    metadata,
    Column("owner", String, primary_key=True),
    Column("sha256", String, primary_key=True),
    Column("reading", String, primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("page", _Json, nullable=False),
    Column("expires_at", Double, nullable=False),
    Index(None, "expires_at"),
)

answers = Table(
    "answers",
    metadata,
    Column("job_id", String, ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("digest", String, primary_key=True),
    Column("answer", _Json, nullable=False),
)

results = Table(
    "results",
    metadata,
    Column("owner", String, primary_key=True),
    Column("digest", String, primary_key=True),
    Column("sha256", String, nullable=False),
    Column("result", _Json, nullable=False),
    Column("expires_at", Double, nullable=False),
    Index(None, "owner", "sha256"),
    Index(None, "expires_at"),
)

deliveries = Table(
    "deliveries",
    metadata,
    Column("id", String, primary_key=True),
    Column("url", _Json, nullable=False),
    Column("payload", _Json, nullable=False),
    Column("num_attempts", Integer, nullable=False),
    Column("next_attempt_at", Double, nullable=False),
    Index(None, "next_attempt_at"),
)
