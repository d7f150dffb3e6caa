"""What goes wrong with disks and databases, as errors that say what to do."""

import contextlib
import errno
from collections.abc import Iterator

from sqlalchemy.exc import DBAPIError, OperationalError

from mmserve.errors import StorageError

_FULL = frozenset((errno.ENOSPC, errno.EDQUOT))
# Disk full and read-only transaction, as PostgreSQL numbers them.
_FULL_STATE, _READ_ONLY_STATE = "53100", "25006"


@contextlib.contextmanager
def storing(what: str) -> Iterator[None]:
    """Raises `StorageError` for what the file system refuses inside."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise _full(what) from error
        raise StorageError(
            "storage_unavailable",
            f"{what} could not be stored ({error.strerror}): the server's operator has to see to it.",
        ) from error


def from_database(error: DBAPIError) -> StorageError | None:
    """None for what is no matter of storage, but a fault of ours."""
    cause = str(error.orig).lower()
    state = getattr(error.orig, "sqlstate", None)
    if state == _FULL_STATE or "disk is full" in cause:
        return _full("What belongs into the database")
    if state == _READ_ONLY_STATE or "readonly database" in cause:
        return _unavailable("can only be read")
    if "database is locked" in cause:
        return _unavailable("is locked by another program")
    if isinstance(error, OperationalError) or error.connection_invalidated:
        return _unavailable("does not answer")
    return None


def _full(what: str) -> StorageError:
    return StorageError("storage_full", f"{what} could not be stored: the disk is full. Remove files or jobs, or wait.")


def _unavailable(state: str) -> StorageError:
    return StorageError("storage_unavailable", f"The database {state}: try again later.")
