"""Loops of a weak model: noticed while they happen, and kept out of the result."""

from collections.abc import Sequence

from mmserve.pipelines.terms import terms_of

_MAX_PERIOD = 64
_MIN_REPEATED_TOKENS = 24
_MIN_ROUNDS = 3
_NEARLY_THE_SAME = 0.8


class LoopDetector:
    """Notices that the end of an answer is the same run of tokens, three times or more."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []

    def push(self, token_ids: Sequence[int]) -> bool:
        """Whether the answer has begun to loop."""
        self._token_ids += token_ids
        return any(self._repeats(period) for period in range(1, _MAX_PERIOD + 1))

    def _repeats(self, period: int) -> bool:
        length = max(_MIN_ROUNDS * period, _MIN_REPEATED_TOKENS)
        tail = self._token_ids[-length:]
        return len(tail) == length and tail[period:] == tail[:-period]


class Novelty:
    """Remembers what was said.

    A statement is not new if nearly all of it was said in one other, or if the other has the same numbers and nearly
    all of what it says is in the statement.
    """

    def __init__(self) -> None:
        self._said: list[tuple[frozenset[str], frozenset[str]]] = []

    def is_new(self, text: str) -> bool:
        return not any(_adds_nothing(*_content(text), *said) for said in self._said)

    def remember(self, text: str) -> None:
        self._said.append(_content(text))


def _adds_nothing(
    keys: frozenset[str], numbers: frozenset[str], said_keys: frozenset[str], said_numbers: frozenset[str]
) -> bool:
    shortest = min(len(keys), len(said_keys)) if numbers and numbers == said_numbers else len(keys)
    return numbers <= said_numbers and len(keys & said_keys) >= _NEARLY_THE_SAME * shortest


def _content(text: str) -> tuple[frozenset[str], frozenset[str]]:
    terms = [term for term in terms_of(text) if term.kind != "function"]
    return frozenset(term.key for term in terms), frozenset(term.key for term in terms if term.kind == "number")
