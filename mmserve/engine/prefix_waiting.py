"""Which blocks of prompts are being computed: a sequence that begins alike waits for them instead of repeating it."""

from collections.abc import Iterable


class BlocksInProgress:
    """Content hashes of blocks, each with the running sequence that computes it."""

    def __init__(self) -> None:
        self._owners: dict[bytes, str] = {}
        self._awaited: dict[str, bytes] = {}

    def __contains__(self, content_hash: bytes) -> bool:
        return content_hash in self._owners

    def start(self, request_id: str, content_hashes: Iterable[bytes]) -> None:
        self._awaited.pop(request_id, None)
        for content_hash in content_hashes:
            self._owners.setdefault(content_hash, request_id)

    def finish(self, content_hash: bytes) -> None:
        """It is published: those who wait for it find it in the prefix cache."""
        self._owners.pop(content_hash, None)

    def give_up(self, request_id: str, content_hashes: Iterable[bytes]) -> None:
        """The sequence computes nothing more, or waits no longer."""
        self._awaited.pop(request_id, None)
        for content_hash in content_hashes:
            if self._owners.get(content_hash) == request_id:
                del self._owners[content_hash]

    def wait(self, request_id: str, content_hash: bytes) -> None:
        self._awaited[request_id] = content_hash

    def is_waiting(self, request_id: str) -> bool:
        """Whether what it waits for is still being computed."""
        return self._awaited.get(request_id) in self._owners

    def check_invariants(self, running: Iterable[str], waiting: Iterable[str]) -> None:
        assert set(self._owners.values()) <= set(running)
        assert set(self._awaited) <= set(waiting)
