"""Loops of a weak model: noticed while they happen, and kept out of the result."""

from collections.abc import Sequence

from mmserve.pipelines.terms import terms_of

_NEARLY_THE_SAME = 0.8


class LoopDetector:
    """Notices that the end of an answer is the same run of at most `max_period` tokens, again and again: at least
    `min_rounds` times, and `min_tokens` long in all."""

    def __init__(self, *, max_period: int = 64, min_rounds: int = 3, min_tokens: int = 24) -> None:
        self._max_period = max_period
        self._min_rounds = min_rounds
        self._min_tokens = min_tokens
        self._token_ids: list[int] = []
        self._period: int | None = None

    def push(self, token_ids: Sequence[int]) -> bool:
        """Whether the answer has begun to loop."""
        self._token_ids += token_ids
        self._period = next((n for n in range(1, self._max_period + 1) if self._repeats(n)), None)
        return self._period is not None

    @property
    def num_tokens_once(self) -> int:
        """Tokens up to the end of the first round, where the answer loops; all of them where it does not."""
        ids, end = self._token_ids, len(self._token_ids)
        if self._period is None:
            return end
        while end > self._period and ids[end - 1] == ids[end - 1 - self._period]:
            end -= 1
        return end

    def _repeats(self, period: int) -> bool:
        length = max(self._min_rounds * period, self._min_tokens)
        if len(self._token_ids) < length or self._token_ids[-1] != self._token_ids[-1 - period]:
            return False
        tail = self._token_ids[-length:]
        return tail[period:] == tail[:-period]


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
