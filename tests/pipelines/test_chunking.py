from hypothesis import given
from hypothesis import strategies as st

from mmserve.pipelines.chunking import PageText, Part, PartPacker


def count(page: PageText) -> int:
    return len(page.text) + 5


def pack(texts: list[str], budget: int) -> list[Part]:
    packer = PartPacker(budget, count)
    parts = [part for number, text in enumerate(texts, start=1) for part in packer.push(PageText(number, text))]
    last = packer.finish()
    return [*parts, *([last] if last else [])]


def test_consecutive_pages_share_a_part_as_long_as_they_fit() -> None:
    parts = pack(["a" * 20, "b" * 20, "c" * 20, "d" * 70, "e"], budget=80)
    assert [part.page_numbers for part in parts] == [[1, 2, 3], [4], [5]]
    assert (parts[0].first_page, parts[0].last_page) == (1, 3)


def test_a_part_is_given_out_as_soon_as_the_next_page_does_not_fit() -> None:
    packer = PartPacker(50, count)
    assert packer.push(PageText(1, "a" * 30)) == []
    assert [part.page_numbers for part in packer.push(PageText(2, "b" * 30))] == [[1]]


def test_a_page_that_is_too_long_is_cut_at_lines_or_sentences() -> None:
    text = "The first line is here.\nThe second line is here.\nThe third one. It goes on here."
    parts = pack([text], budget=40)
    pieces = [piece.text for part in parts for piece in part.texts]
    assert "".join(pieces) == text
    assert {part.first_page for part in parts} == {1}
    assert all(piece.endswith(("\n", ". ", ".")) for piece in pieces)


def test_nothing_gives_no_part() -> None:
    assert pack([], budget=10) == []


@given(st.lists(st.text(alphabet="ab .\n", max_size=200), max_size=12), st.integers(7, 120))
def test_parts_fit_the_budget_and_lose_nothing(texts: list[str], budget: int) -> None:
    parts = pack(texts, budget)
    assert all(sum(map(count, part.texts)) <= budget for part in parts)
    for number, text in enumerate(texts, start=1):
        assert "".join(piece.text for part in parts for piece in part.texts if piece.number == number) == text
    numbers = [piece.number for part in parts for piece in part.texts]
    assert numbers == sorted(numbers)
