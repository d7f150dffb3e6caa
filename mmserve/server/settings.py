"""What an operator decides about the server itself; what concerns the engine is in `EngineConfig`."""

from dataclasses import dataclass
from pathlib import Path

from mmserve.errors import RequestError
from mmserve.jobs.outbound import parse_allowed_hosts

MIB = 1024**2


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How much the server takes. Times are in seconds; `request_timeout=None` is no limit."""

    request_timeout: float | None = None
    shutdown_timeout: float = 30.0
    max_json_bytes: int = 32 * MIB
    max_upload_bytes: int = 256 * MIB
    max_files: int = 64
    max_concurrent_documents: int = 4
    upload_dir: Path | None = None
    max_images_per_request: int = 64
    max_media_bytes: int = 32 * MIB
    allowed_media_hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check(self.request_timeout is None or self.request_timeout > 0, "request-timeout", "must be above 0")
        _check(self.shutdown_timeout >= 0, "shutdown-timeout", "must not be negative")
        _check(self.max_json_bytes > 0, "max-json-bytes", "must be positive")
        _check(self.max_upload_bytes > 0, "max-upload-size", "must be positive")
        _check(self.max_files > 0, "max-files", "must be positive")
        _check(self.max_images_per_request > 0, "max-images-per-request", "must be positive")
        _check(self.max_media_bytes > 0, "max-media-size", "must be positive")
        parse_allowed_hosts(self.allowed_media_hosts)
        _check(self.max_concurrent_documents > 0, "max-concurrent-documents", "must be positive")


def _check(condition: bool, option: str, sentence: str) -> None:
    if not condition:
        raise RequestError("invalid_request", f"--{option} {sentence}", param=option)
