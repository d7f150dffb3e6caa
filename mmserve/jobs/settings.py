"""What an operator decides about files and jobs."""

from dataclasses import dataclass, field
from pathlib import Path

from mmserve.errors import RequestError
from mmserve.jobs.webhooks import WebhookOptions

_DAY = 24 * 3600.0
_GIB = 1024**3


@dataclass(frozen=True, kw_only=True)
class JobSettings:
    """`database_url` None is SQLite in `data_dir`. Files, results and events are kept for `retention_seconds`.

    Webhooks go to `webhook_hosts` alone (`host`, `*.domain`, `host:port`), signed with `webhook_secret` (`whsec_` and
    base64). A job whose server stopped answering is taken over after `lease_seconds`. With several owners one of them
    may have half of the queue.
    """

    data_dir: Path
    database_url: str | None = None
    retention_seconds: float = 7 * _DAY
    max_stored_bytes_of_owner: int = 20 * _GIB
    max_queued_jobs: int = 1000
    has_owners: bool = False
    max_concurrent_documents: int = 4
    webhook_hosts: tuple[str, ...] = ()
    webhook_secret: str | None = field(default=None, repr=False)
    lease_seconds: float = 15.0

    def __post_init__(self) -> None:
        for name in (
            "retention_seconds",
            "max_stored_bytes_of_owner",
            "max_queued_jobs",
            "max_concurrent_documents",
            "lease_seconds",
        ):
            if getattr(self, name) <= 0:
                raise RequestError("invalid_request", f"{name} must be above 0", param=name)
        _ = self.webhooks

    @property
    def webhooks(self) -> WebhookOptions:
        """Raises `RequestError` for hosts or a secret that are none."""
        return WebhookOptions(hosts=self.webhook_hosts, secret=self.webhook_secret)

    @property
    def max_queued_jobs_of_owner(self) -> int:
        return max(self.max_queued_jobs // 2, 1) if self.has_owners else self.max_queued_jobs

    @property
    def url(self) -> str:
        return self.database_url or f"sqlite:///{self.data_dir / 'mmserve.db'}"
