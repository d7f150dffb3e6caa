"""The pages that were read, as something in which a statement can be looked up."""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from mmserve.pipelines.sentences import page_sentences
from mmserve.pipelines.terms import Term, terms_of
from mmserve.pipelines.words import NEGATIONS, guess_language

_NEAR = 6


@dataclass(frozen=True)
class SourceSentence:
    """A sentence as it stands on a page."""

    page: int
    text: str
    keys: frozenset[str]
    is_negated: bool


@dataclass
class SourcePage:
    """A page's terms. `keys` are all in order; `places` says where among them each stands."""

    number: int
    text: str
    sentences: tuple[SourceSentence, ...]
    keys: list[str]
    places: dict[str, list[int]]
    words: frozenset[str]
    language: str | None

    @classmethod
    def of(cls, number: int, text: str) -> "SourcePage":
        terms = terms_of(text)
        places: dict[str, list[int]] = defaultdict(list)
        for place, term in enumerate(terms):
            places[term.key].append(place)
        words = [term.text.casefold() for term in terms]
        sentences = tuple(source_sentence(number, sentence) for sentence in page_sentences(text))
        keys = [term.key for term in terms]
        return cls(number, text, sentences, keys, dict(places), frozenset(words), guess_language(words))

    def holds(self, term: Term) -> bool:
        """Whether the page has the term. A name must stand there as such, whatever its case."""
        return term.key in (self.words if term.kind == "name" else self.places)

    def holds_near(self, term: Term, neighbours: Sequence[Term]) -> bool:
        """Whether one of `neighbours` stands near the term somewhere on the page."""
        wanted = {key for other in neighbours for key in _keys(other)}
        if not wanted:
            return True
        return any(
            wanted.intersection(self.keys[max(place - _NEAR, 0) : place + _NEAR + 1])
            for key in _keys(term)
            for place in self.places.get(key, ())
        )


def source_sentence(page: int, text: str) -> SourceSentence:
    terms = terms_of(text)
    keys = frozenset(term.key for term in terms if term.kind != "function")
    return SourceSentence(page, text, keys, any(term.text.casefold() in NEGATIONS for term in terms))


def _keys(term: Term) -> list[str]:
    """A name is looked up among words by its stem."""
    return [key.key for key in terms_of(term.text)] if term.kind == "name" else [term.key]


@dataclass
class Sources:
    """All pages with text, and how rare a term is among them."""

    pages: dict[int, SourcePage] = field(default_factory=dict)
    _num_pages_with: Counter[str] = field(default_factory=Counter)

    def add(self, number: int, text: str) -> None:
        page = SourcePage.of(number, text)
        self.pages[number] = page
        self._num_pages_with.update(page.places.keys())

    def subset(self, numbers: Sequence[int]) -> "Sources":
        """The same rarity, fewer pages."""
        return Sources({number: self.pages[number] for number in numbers}, self._num_pages_with)

    def rarity(self, key: str) -> float:
        """Above 0; greatest for what stands on no page."""
        total = max(self._num_pages_with.total(), 1)
        return math.log(2.0 + len(self.pages) / (self._num_pages_with[key] or 0.5)) if total else 1.0

    def knows(self, key: str) -> bool:
        return key in self._num_pages_with

    @property
    def language(self) -> str | None:
        """The language of most pages, None where it is not clear."""
        counts = Counter(page.language for page in self.pages.values() if page.language is not None)
        return counts.most_common(1)[0][0] if counts else None

    @property
    def sentences(self) -> list[SourceSentence]:
        return list(itertools.chain.from_iterable(page.sentences for page in self.pages.values()))
