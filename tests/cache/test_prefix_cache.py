"""Chained block hashes, and an index that believes tokens rather than hashes."""

from hypothesis import assume, given
from hypothesis import strategies as st

from mmserve.cache.prefix_cache import PrefixCache, block_hash
from mmserve.request import ImageSpan

TOKENS = [7, 8, 9, 10]


def image(offset: int, length: int = 4, content: bytes = b"A" * 16) -> ImageSpan:
    return ImageSpan(offset, length, content)


def test_hash_follows_tokens_and_all_before_them() -> None:
    first = block_hash(b"", TOKENS, 0)
    assert first == block_hash(b"", list(TOKENS), 0)
    assert first != block_hash(b"", [7, 8, 9, 11], 0)
    assert first != block_hash(b"", [8, 7, 9, 10], 0)
    assert first != block_hash(first, TOKENS, 4)
    assert block_hash(first, TOKENS, 4) != block_hash(block_hash(b"", [0, 8, 9, 10], 0), TOKENS, 4)


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=6), st.lists(st.integers(0, 2**40), min_size=1, max_size=6))
def test_different_tokens_have_different_hashes(one: list[int], other: list[int]) -> None:
    assume(one != other)
    assert block_hash(b"", one, 0) != block_hash(b"", other, 0)


def test_large_token_ids_are_not_cut() -> None:
    assert block_hash(b"", [1], 0) != block_hash(b"", [1 + 2**16], 0)
    assert block_hash(b"", [1], 0) != block_hash(b"", [1 + 2**32], 0)


def test_an_overlapping_image_changes_the_hash() -> None:
    plain = block_hash(b"", TOKENS, 4)
    for offset in (1, 2, 4, 7):
        assert block_hash(b"", TOKENS, 4, [image(offset)]) != plain
    assert block_hash(b"", TOKENS, 4, [image(0, length=100)]) != plain


def test_an_image_outside_the_block_changes_nothing() -> None:
    plain = block_hash(b"", TOKENS, 4)
    assert block_hash(b"", TOKENS, 4, [image(0), image(8)]) == plain


def test_other_images_have_other_hashes() -> None:
    """The fault of others: the second image gets the first one's keys and values."""
    assert block_hash(b"", TOKENS, 0, [image(0)]) != block_hash(b"", TOKENS, 0, [image(0, content=b"B" * 16)])


def test_the_offset_inside_an_image_changes_the_hash() -> None:
    """Placeholders look alike: the same block of them may be another part of the same image."""
    hashes = {block_hash(b"", TOKENS, 8, [image(offset, length=100)]) for offset in (0, 1, 4, 8, 9)}
    assert len(hashes) == 5


def test_the_order_of_two_images_changes_the_hash() -> None:
    a, b = b"A" * 16, b"B" * 16
    one = block_hash(b"", TOKENS, 0, [image(0, 2, a), image(2, 2, b)])
    other = block_hash(b"", TOKENS, 0, [image(0, 2, b), image(2, 2, a)])
    assert one != other


def test_what_is_published_is_found_until_it_is_evicted() -> None:
    cache = PrefixCache()
    assert cache.find(b"h", b"", TOKENS) is None
    assert cache.publish(b"h", b"", TOKENS, 3)
    assert cache.find(b"h", b"", tuple(TOKENS)) == 3
    cache.evict(3)
    assert cache.find(b"h", b"", TOKENS) is None


def test_the_same_content_is_published_once() -> None:
    cache = PrefixCache()
    assert cache.publish(b"h", b"", TOKENS, 3)
    assert not cache.publish(b"h", b"", TOKENS, 4)
    assert cache.find(b"h", b"", TOKENS) == 3


def test_a_hash_alone_is_not_believed() -> None:
    cache = PrefixCache()
    cache.publish(b"h", b"parent", TOKENS, 3)
    assert cache.find(b"h", b"parent", [7, 8, 9, 11]) is None
    assert cache.find(b"h", b"parent", TOKENS[:3]) is None
    assert cache.find(b"h", b"other parent", TOKENS) is None
    assert cache.find(b"h", b"parent", TOKENS) == 3


def test_a_colliding_block_keeps_the_first_content() -> None:
    cache = PrefixCache()
    assert cache.publish(b"h", b"", TOKENS, 3)
    assert not cache.publish(b"h", b"", [1, 2, 3, 4], 5)
    assert cache.find(b"h", b"", [1, 2, 3, 4]) is None
    assert cache.find(b"h", b"", TOKENS) == 3


def test_the_tokens_are_kept_by_value() -> None:
    cache, tokens = PrefixCache(), list(TOKENS)
    cache.publish(b"h", b"", tokens, 3)
    tokens[0] = 0
    assert cache.find(b"h", b"", TOKENS) == 3
