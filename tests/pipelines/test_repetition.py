import pytest

from mmserve.pipelines.repetition import LoopDetector, Novelty


@pytest.mark.parametrize(("period", "rounds"), [(1, 24), (2, 12), (8, 3), (40, 3), (64, 3)])
def test_a_loop_is_noticed_at_its_third_round_or_the_24th_token(period: int, rounds: int) -> None:
    detector = LoopDetector()
    tokens = [1000 + i for i in range(50)] + list(range(period)) * rounds
    found = [detector.push([token]) for token in tokens]
    assert found.index(True) == len(tokens) - 1


def test_what_only_resembles_a_loop_is_none() -> None:
    detector = LoopDetector()
    tokens = [token for number in range(100) for token in (1, 2, 3, 100 + number)]
    assert not any(detector.push(tokens[i : i + 3]) for i in range(0, len(tokens), 3))


def test_repeated_statements_are_not_new() -> None:
    novelty = Novelty()
    novelty.remember("The invoice of £400 is due on 3 May 2025.")
    assert not novelty.is_new("The invoice of £400 is due on 3 May 2025.")
    assert not novelty.is_new("An invoice is due on 3 May.")
    assert novelty.is_new("The invoice of £500 is due on 3 May 2025.")
    assert not novelty.is_new("The invoice of £400 for the paint is due on 3 May 2025 at noon.")
    assert novelty.is_new("The invoice of £400 was paid late by Northgate University in Durham.")
