"""Longest cached prefix: chained block hash -> block id, confirmed by the tokens themselves."""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from mmserve.request import ImageSpan


@dataclass(frozen=True)
class CachedBlock:
    """What a block holds: its tokens and the hash of everything before it."""

    block_id: int
    parent_hash: bytes
    token_ids: tuple[int, ...]


def block_hash(parent_hash: bytes, token_ids: Sequence[int], start: int, images: Sequence[ImageSpan] = ()) -> bytes:
    """Hash of a block that starts at token `start`: its tokens, all before it, and every image that it overlaps.

    The parent of a prompt's first block is the salt of its cache: empty, or whatever keeps it apart from others.
    """
    digest = hashlib.blake2b(parent_hash, digest_size=16)
    digest.update(array("q", token_ids).tobytes())
    stop = start + len(token_ids)
    for image in images:
        if image.offset < stop and start < image.end:
            digest.update(image.content_hash + (start - image.offset).to_bytes(8, "little", signed=True))
    return digest.digest()


class PrefixCache:
    """Index of published blocks. The caller holds the references; this class holds none."""

    def __init__(self) -> None:
        self._by_hash: dict[bytes, CachedBlock] = {}
        self._hash_of_block: dict[int, bytes] = {}
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    def find(self, content_hash: bytes, parent_hash: bytes, token_ids: Sequence[int]) -> int | None:
        """The block with this content, or None. A colliding hash with other tokens is a miss."""
        block = self._by_hash.get(content_hash)
        if block is None or block.parent_hash != parent_hash or block.token_ids != tuple(token_ids):
            return None
        return block.block_id

    def publish(self, content_hash: bytes, parent_hash: bytes, token_ids: Sequence[int], block_id: int) -> bool:
        """Offer a full block. False where the same content is already cached in another block."""
        if content_hash in self._by_hash:
            return False
        self._by_hash[content_hash] = CachedBlock(block_id, parent_hash, tuple(token_ids))
        self._hash_of_block[block_id] = content_hash
        return True

    def evict(self, block_id: int) -> None:
        del self._by_hash[self._hash_of_block.pop(block_id)]
