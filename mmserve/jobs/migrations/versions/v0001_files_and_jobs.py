"""Files, jobs, and what is remembered of both."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    _files()
    _jobs()
    _deliveries()


def _files() -> None:
    op.create_table(
        "files",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("filename", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("media_type", sa.String(), nullable=False),
        sa.Column("num_pages", sa.Integer(), nullable=False),
        sa.Column("sha256", sa.String(), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_files"),
    )
    op.create_index("ix_files_expires_at", "files", ["expires_at"], unique=False)
    op.create_index("ix_files_owner_id", "files", ["owner", "id"], unique=False)
    op.create_index("ix_files_owner_sha256", "files", ["owner", "sha256"], unique=False)
    op.create_table(
        "page_texts",
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("sha256", sa.String(), nullable=False),
        sa.Column("reading", sa.String(), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("page", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("owner", "sha256", "reading", "number", name="pk_page_texts"),
    )
    op.create_index("ix_page_texts_expires_at", "page_texts", ["expires_at"], unique=False)
    op.create_table(
        "results",
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("sha256", sa.String(), nullable=False),
        sa.Column("result", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("owner", "digest", name="pk_results"),
    )
    op.create_index("ix_results_expires_at", "results", ["expires_at"], unique=False)
    op.create_index("ix_results_owner_sha256", "results", ["owner", "sha256"], unique=False)


def _jobs() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("task", sa.String(), nullable=False),
        sa.Column("options", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("no_cache", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.Column("error", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("webhook_url", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("idempotency_key", sa.String(), nullable=True),
        sa.Column("request_digest", sa.String(), nullable=True),
        sa.Column("num_events", sa.Integer(), nullable=False),
        sa.Column("num_starts", sa.Integer(), nullable=False),
        sa.Column("claimed_by", sa.String(), nullable=True),
        sa.Column("lease_until", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_jobs"),
        sa.UniqueConstraint("owner", "idempotency_key", name="uq_jobs_owner_idempotency_key"),
    )
    op.create_index("ix_jobs_expires_at", "jobs", ["expires_at"], unique=False)
    op.create_index("ix_jobs_owner_id", "jobs", ["owner", "id"], unique=False)
    op.create_index("ix_jobs_status_id", "jobs", ["status", "id"], unique=False)
    op.create_table(
        "job_files",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("index", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("file_id", sa.String(), nullable=False),
        sa.Column("filename", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("sha256", sa.String(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("num_pages", sa.Integer(), nullable=True),
        sa.Column("num_pages_read", sa.Integer(), nullable=False),
        sa.Column("error", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("result", sa.JSON(none_as_null=True), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_job_files_job_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "index", name="pk_job_files"),
    )
    op.create_index("ix_job_files_file_id", "job_files", ["file_id"], unique=False)
    op.create_table(
        "job_events",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("event", sa.String(), nullable=False),
        sa.Column("data", sa.JSON(none_as_null=True), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_job_events_job_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "number", name="pk_job_events"),
    )
    op.create_table(
        "answers",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("answer", sa.JSON(none_as_null=True), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_answers_job_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "digest", name="pk_answers"),
    )


def _deliveries() -> None:
    op.create_table(
        "deliveries",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("url", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("payload", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("num_attempts", sa.Integer(), nullable=False),
        sa.Column("next_attempt_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_deliveries"),
    )
    op.create_index("ix_deliveries_next_attempt_at", "deliveries", ["next_attempt_at"], unique=False)
