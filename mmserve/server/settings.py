"""What an operator decides about the server itself; what concerns the engine is in `EngineConfig`."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from mmserve.errors import RequestError
from mmserve.jobs.outbound import parse_allowed_hosts
from mmserve.jobs.settings import JobSettings
from mmserve.server.access import KeyRing
from mmserve.server.browsers import check_origins
from mmserve.server.rate_limit import parse_rate

MIB = 1024**2


def default_data_dir() -> Path:
    """Where this user's programs keep what outlives them (XDG base directories)."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "mmserve"


@dataclass(frozen=True, kw_only=True)
class AccessSettings:
    """Who may use the server, and what owners may notice of each other.

    Without `keys` all are one owner, and `allowed_hosts` are the names by which browsers may ask (empty: any).
    `cors_origins` are pages of other sites that may use the server. `rate_limit` is each owner's, as `60/minute`.
    """

    keys: KeyRing | None = None
    open_metrics: bool = False
    open_docs: bool = False
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    rate_limit: str | None = None
    share_caches: bool = False

    def __post_init__(self) -> None:
        check_origins(self.cors_origins)
        if self.rate_limit is not None:
            parse_rate(self.rate_limit)


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How much the server takes, and where it keeps what. Times are in seconds; a timeout of None is no limit.

    `queue_timeout` is for documents that wait for their turn. Files, jobs and results are in `data_dir`, those that are
    rows in SQLite there or at `database_url`.
    """

    access: AccessSettings = field(default_factory=AccessSettings)
    request_timeout: float | None = None
    queue_timeout: float | None = None
    upload_timeout: float = 600.0
    shutdown_timeout: float = 30.0
    max_json_bytes: int = 32 * MIB
    max_upload_bytes: int = 256 * MIB
    max_files: int = 64
    max_concurrent_documents: int = JobSettings.max_concurrent_documents
    upload_dir: Path | None = None
    max_images_per_request: int = 64
    max_media_bytes: int = 32 * MIB
    allowed_media_hosts: tuple[str, ...] = ()
    otlp_traces_endpoint: str | None = None
    data_dir: Path = field(default_factory=default_data_dir)
    database_url: str | None = None
    retention_seconds: float = JobSettings.retention_seconds
    max_stored_bytes: int = JobSettings.max_stored_bytes_of_owner
    max_queued_jobs: int = JobSettings.max_queued_jobs
    webhook_hosts: tuple[str, ...] = ()
    webhook_secret: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        _check(self.request_timeout is None or self.request_timeout > 0, "request-timeout", "must be above 0")
        _check(self.queue_timeout is None or self.queue_timeout > 0, "queue-timeout", "must be above 0")
        _check(self.upload_timeout > 0, "upload-timeout", "must be above 0")
        _check(self.shutdown_timeout >= 0, "shutdown-timeout", "must not be negative")
        _check(self.max_json_bytes > 0, "max-json-bytes", "must be positive")
        _check(self.max_upload_bytes > 0, "max-upload-size", "must be positive")
        _check(self.max_files > 0, "max-files", "must be positive")
        _check(self.max_images_per_request > 0, "max-images-per-request", "must be positive")
        _check(self.max_media_bytes > 0, "max-media-size", "must be positive")
        parse_allowed_hosts(self.allowed_media_hosts)
        _check(self.max_concurrent_documents > 0, "max-concurrent-documents", "must be positive")
        _check(self.retention_seconds > 0, "retention", "must be positive")
        _check(self.max_stored_bytes > 0, "max-stored-size", "must be positive")
        _check(self.max_queued_jobs > 0, "max-queued-jobs", "must be positive")
        _ = self.jobs

    @property
    def jobs(self) -> JobSettings:
        """Raises `RequestError` for hosts or a secret that are none."""
        return JobSettings(
            data_dir=self.data_dir,
            database_url=self.database_url,
            retention_seconds=self.retention_seconds,
            max_stored_bytes_of_owner=self.max_stored_bytes,
            max_queued_jobs=self.max_queued_jobs,
            has_owners=self.access.keys is not None,
            max_concurrent_documents=self.max_concurrent_documents,
            webhook_hosts=self.webhook_hosts,
            webhook_secret=self.webhook_secret,
        )


def _check(condition: bool, option: str, sentence: str) -> None:
    if not condition:
        raise RequestError("invalid_request", f"--{option} {sentence}", param=option)
