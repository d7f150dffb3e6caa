"""Salts keep caches apart: blocks of prompts, blocks in progress, pictures."""

import asyncio

import pytest
from fake_runner import SchedulerDriver
from test_prompt_builder import FakePool, LetterTokenizer, picture

from mmserve.engine.prompt_builder import PromptBuilder

PROMPT = list(range(3, 23))


def cached_after(first: bytes, second: bytes) -> int:
    driver = SchedulerDriver(block_size=4)
    driver.add("first", PROMPT, max_tokens=2, cache_salt=first)
    driver.run()
    driver.add("second", PROMPT, max_tokens=2, cache_salt=second)
    driver.run()
    assert driver.answers["first"] is not driver.answers["second"]
    driver.assert_nothing_is_owned()
    return driver.outputs["second"].num_cached_tokens


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [(b"", b"", 16), (b"a", b"a", 16), (b"a", b"b", 0), (b"a", b"", 0), (b"", b"a", 0)],
)
def test_a_prefix_is_shared_within_one_salt(first: bytes, second: bytes, expected: int) -> None:
    assert cached_after(first, second) == expected


def test_nobody_waits_for_blocks_of_another_salt() -> None:
    driver = SchedulerDriver(block_size=4, max_num_batched_tokens=12)
    driver.add("a", PROMPT, max_tokens=1, cache_salt=b"a")
    driver.add("b", PROMPT, max_tokens=1, cache_salt=b"b")
    driver.add("a again", PROMPT, max_tokens=1, cache_salt=b"a")
    assert driver.step() == {"a": 12}
    assert driver.step() == {"a": 8, "b": 4}
    assert driver.waiting() == ["a again"]
    driver.run()
    assert [driver.outputs[name].num_cached_tokens for name in ("a", "b", "a again")] == [0, 0, 16]


def test_pictures_of_two_salts_are_two_pictures() -> None:
    pool = FakePool()
    plain = PromptBuilder(LetterTokenizer(), pool.processor, pool)  # type: ignore[arg-type]
    messages = [{"role": "user", "content": [picture(1)]}]

    async def content_hash(builder: PromptBuilder) -> bytes:
        async with builder.build(messages) as prompt:
            return prompt.images[0].content_hash

    async def hashes() -> list[bytes]:
        return [await content_hash(each) for each in (plain, plain.salted(b"a"), plain.salted(b"b"), plain)]

    first, a, b, last = asyncio.run(hashes())
    assert first == last
    assert len({first, a, b}) == 3
    again = asyncio.run(content_hash(plain.salted(b"a")))
    assert again == a
