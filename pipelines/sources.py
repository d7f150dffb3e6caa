"""The pages that were read, as something in which a statement can be looked up.

Of a page its text is kept, and an index says on which pages a term stands; the rest is worked out for the few pages on
which a statement may have been read.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from mmserve.pipelines.sentences import page_sentences
from mmserve.pipelines.terms import Term, terms_of
from mmserve.pipelines.words import NEGATIONS, guess_language


@dataclass(frozen=True)
class SourceSentence:
    """A sentence as it stands on a page; `keys` are of its terms but for function words, `first_key` of the first."""

    page: int
    text: str
    keys: frozenset[str]
    first_key: str
    is_negated: bool

    @property
    def is_prose(self) -> bool:
        return self.text.endswith((".", "!", "?", "。"))


@dataclass(frozen=True)
class SourcePage:
    """A page's terms but for function words: `keys` are in order, `places` says where among them each stands."""

    number: int
    text: str
    sentences: tuple[SourceSentence, ...]
    keys: tuple[str, ...]
    places: dict[str, list[int]]
    words: frozenset[str]
    language: str | None

    def holds(self, term: Term) -> bool:
        """Whether the page has the term. A name must stand there as such, whatever its case."""
        return term.key in (self.words if term.kind == "name" else self.places)

    def holds_near(self, term: Term, neighbours: Sequence[Term], *, distance: int) -> bool:
        """Whether one of `neighbours`, if there are any, stands within `distance` terms of the term on the page."""
        wanted = index_keys(neighbours)
        return not wanted or any(
            wanted.intersection(
                self.keys[max(place - distance, 0) : place] + self.keys[place + 1 : place + distance + 1]
            )
            for key in index_keys([term])
            for place in self.places.get(key, ())
        )


def index_keys(terms: Iterable[Term]) -> set[str]:
    """Keys by which pages are indexed: a name goes by its stem there."""
    keys: set[str] = set()
    for term in terms:
        keys.update([part.key for part in terms_of(term.text)] if term.kind == "name" else [term.key])
    return keys


@lru_cache(maxsize=64)
def _analyse(number: int, text: str) -> SourcePage:
    terms = terms_of(text)
    keys = tuple(term.key for term in terms if term.kind != "function")
    places: dict[str, list[int]] = defaultdict(list)
    for place, key in enumerate(keys):
        places[key].append(place)
    words = [term.text.casefold() for term in terms]
    sentences = tuple(_source_sentence(number, sentence) for sentence in page_sentences(text))
    return SourcePage(number, text, sentences, keys, dict(places), frozenset(words), guess_language(words))


def _source_sentence(page: int, text: str) -> SourceSentence:
    terms = terms_of(text)
    keys = [term.key for term in terms if term.kind != "function"]
    first_key = keys[0] if keys else ""
    return SourceSentence(
        page, text, frozenset(keys), first_key, any(term.text.casefold() in NEGATIONS for term in terms)
    )


class Sources:
    """The text of pages, and the pages on which each term stands."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}
        self._pages_with: dict[str, list[int]] = defaultdict(list)
        self._languages: Counter[str] = Counter()
        self._hearsay: set[int] = set()

    def add(self, number: int, text: str, *, is_quotable: bool = True) -> None:
        """What is not quotable is what a model read there: it supports statements, but is not the page's own word."""
        self._hearsay.update(() if is_quotable else (number,))
        page = _analyse(number, text)
        self._texts[number] = text
        for key in page.places:
            self._pages_with[key].append(number)
        if page.language is not None:
            self._languages[page.language] += 1

    @property
    def page_numbers(self) -> list[int]:
        return list(self._texts)

    def quotable(self, numbers: Iterable[int] | None = None) -> list[int]:
        """Those of `numbers`, by default of all pages, that were read word for word."""
        return [n for n in (self._texts if numbers is None else numbers) if n in self._texts and n not in self._hearsay]

    def text(self, number: int) -> str:
        return self._texts[number]

    def page(self, number: int) -> SourcePage:
        return _analyse(number, self._texts[number])

    def pages(self, numbers: Iterable[int] | None = None) -> Iterator[SourcePage]:
        """One after the other: not all of them are held at once."""
        return (self.page(number) for number in (self._texts if numbers is None else numbers))

    def pages_with(self, key: str) -> Sequence[int]:
        return self._pages_with.get(key, ())

    def rarity(self, key: str) -> float:
        """Above 0; greatest for what stands on no page."""
        return math.log(2.0 + len(self._texts) / (len(self.pages_with(key)) or 0.5))

    @property
    def language(self) -> str | None:
        """The language of most pages, None where it is not clear."""
        return self._languages.most_common(1)[0][0] if self._languages else None
