"""Where a statement was read: the pages that support it, or the finding that none does.

A model's own page marks are not believed, and neither are its statements. A page supports a statement if

- each of its numbers, dates, codes and names stands on the page (`£4,111.00` is `4111`, `two` is `2`, `März 2025` is
  `March 2025`; a percentage is no plain number);
- each number stands there near a word that it stands beside in the statement, or in a sentence with half its words, and
  near its unit if the page has that: `21 July` on the page does not support `within 21 days`;
- the numbers of one phrase stand in one sentence there, and names that stand side by side do so on the page;
- four fifths of its words, weighted by rarity, are among those numbers and names, or in the two sentences of the page
  that fit best;
- the sentence that says nearly the same is not negated where the statement is not, or the other way round, and does
  not say it of somebody else.

One page has to support all of it; else the statement is cut into its clauses and each is looked up for itself. A
statement in another language than the page is judged by its numbers and names alone, and needs at least one.

This is evidence, not proof: it finds what was made up or mixed up, and it cannot follow an argument.
"""

import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property

from mmserve.pipelines.sources import SourcePage, Sources, SourceSentence, index_keys
from mmserve.pipelines.terms import Term, claims_of, terms_of
from mmserve.pipelines.words import MAGNITUDES, NEGATIONS, guess_language

_MIN_COVERAGE = 0.8
_SAME_SENTENCE = 0.75
_MAX_PASSAGE_SENTENCES = 2
_MAX_CANDIDATE_PAGES = 12
_MAX_CITED_PAGES = 3
_NEAR_NUMBERS, _NEAR_UNITS, _NEAR_NAMES = 5, 3, 2
_CURRENCIES = {"£": "gbp", "$": "usd", "€": "eur", "¥": "jpy", "₹": "inr"}
_CLAUSE = re.compile(r";\s+|,?\s+(?:and|but|while|und|aber|während|et|mais|y|pero)\s+")
_PHRASE = re.compile(r"[,;]\s+|\s+(?:and|but|while|und|aber|während|et|mais|y|pero)\s+")
_WEIGHT_OF_ANCHOR = 4.0


@dataclass(frozen=True)
class Claim:
    """A statement, or a clause of one, as it is looked up."""

    text: str

    @cached_property
    def terms(self) -> tuple[Term, ...]:
        return tuple(claims_of(self.text))

    @cached_property
    def anchors(self) -> tuple[Term, ...]:
        """Numbers and names: what a page has to have."""
        return tuple(term for term in self.terms if term.kind in ("number", "name"))

    @cached_property
    def _words(self) -> list[str]:
        return [term.text.casefold() for term in terms_of(self.text)]

    @cached_property
    def is_negated(self) -> bool:
        return any(word in NEGATIONS for word in self._words)

    @cached_property
    def language(self) -> str | None:
        return guess_language(self._words)

    def is_foreign_to(self, language: str | None) -> bool:
        return None not in (language, self.language) and language != self.language


class CitationFinder:
    """Looks statements up in the pages of one document, or in those of it that `within` names."""

    def __init__(self, sources: Sources, within: Collection[int] | None = None) -> None:
        self._sources = sources
        self._within = within

    def find(self, statement: str) -> tuple[int, ...]:
        """The numbers of the pages that support the statement, in ascending order; empty if none does."""
        claim = Claim(statement)
        if not claim.terms or self._has_unknown_subject(claim):
            return ()
        page = self._best_page(claim)
        return (page,) if page is not None else self._pages_by_clause(statement)

    def is_beyond_checking(self, statement: str) -> bool:
        """Whether the statement is in another language than the document, with nothing to look up."""
        claim = Claim(statement)
        return claim.is_foreign_to(self._sources.language) and not claim.anchors

    def _has_unknown_subject(self, claim: Claim) -> bool:
        """A statement's first word is capitalised anyway; one that no page knows is taken for an invented name."""
        first = claim.terms[0]
        is_first = first.is_capital and first.kind == "word" and claim.text.lstrip("\"'“‘«(").startswith(first.text)
        if not is_first or first.text.endswith("ly") or claim.is_foreign_to(self._sources.language):
            return False
        return not self._sources.pages_with(first.key)

    def _best_page(self, claim: Claim) -> int | None:
        pages = self._sources.pages(self._candidates(claim))
        return next((page.number for page in pages if self._supports(page, claim)), None)

    def _pages_by_clause(self, statement: str) -> tuple[int, ...]:
        """Pages of a statement that was read on two or three of them, each a clause."""
        clauses = [clause for clause in map(Claim, _CLAUSE.split(statement)) if clause.terms]
        pages = [self._best_page(clause) for clause in clauses]
        found = {page for page in pages if page is not None}
        return tuple(sorted(found)) if None not in pages and 2 <= len(found) <= _MAX_CITED_PAGES else ()

    def _candidates(self, claim: Claim) -> list[int]:
        """The pages that have most of the claim, best first, the earlier one first among equals."""
        scores: Counter[int] = Counter()
        for term in claim.terms:
            weight = 1.0 if term.kind == "word" else _WEIGHT_OF_ANCHOR
            for key in index_keys([term]):
                for number in self._sources.pages_with(key):
                    scores[number] += weight * self._sources.rarity(key)  # type: ignore[assignment]
        allowed = [number for number in scores if self._within is None or number in self._within]
        return sorted(allowed, key=lambda number: (-scores[number], number))[:_MAX_CANDIDATE_PAGES]

    def _supports(self, page: SourcePage, claim: Claim) -> bool:
        if claim.is_foreign_to(page.language):
            return _holds_foreign(page, claim)
        return (
            all(page.holds(term) for term in claim.anchors)
            and _currencies_agree(page, claim)
            and _numbers_fit(page, claim)
            and _numbers_belong_together(page, claim)
            and _names_fit(page, claim)
            and self._covers(page, claim)
        )

    def _covers(self, page: SourcePage, claim: Claim) -> bool:
        """Whether numbers, names and the best fitting sentences of the page have nearly all that is claimed."""
        wanted = {key: self._sources.rarity(key) for key in index_keys(claim.terms)}
        missing, sentences = set(wanted), list(page.sentences)
        for rank in range(min(_MAX_PASSAGE_SENTENCES, len(sentences))):
            best = max(sentences, key=lambda sentence: _total(wanted, sentence.keys & missing))
            share = _total(wanted, best.keys & wanted.keys()) / _total(wanted, wanted)
            if rank == 0 and share >= _SAME_SENTENCE and _contradicts(page, best, claim):
                return False
            missing -= best.keys
            sentences.remove(best)
        missing -= index_keys(claim.anchors)
        return _total(wanted, missing) <= (1.0 - _MIN_COVERAGE) * _total(wanted, wanted)


def _contradicts(page: SourcePage, sentence: SourceSentence, claim: Claim) -> bool:
    """Whether a sentence that has nearly all words of the claim is negated otherwise, or speaks of somebody else.

    It does if it begins with another word than the claim, and the claim with one with which other sentences begin.
    """
    subject = index_keys(claim.terms[:1])
    others = {other.first_key for other in page.sentences if other.is_prose and other is not sentence}
    is_of_another = sentence.is_prose and not subject & sentence.keys and bool(subject & others)
    has_other_subject = is_of_another and sentence.first_key not in index_keys(claim.terms)
    return sentence.is_negated != claim.is_negated or has_other_subject


def _total(weights: dict[str, float], keys: Iterable[str]) -> float:
    return sum(weights[key] for key in keys)


def _holds_foreign(page: SourcePage, claim: Claim) -> bool:
    """All numbers and at least one anchor; names too, except in German, where every noun looks like one."""
    needed = [term for term in claim.anchors if term.kind == "number" or claim.language != "de"]
    return any(map(page.holds, claim.anchors)) and all(map(page.holds, needed)) and _currencies_agree(page, claim)


def _currencies_agree(page: SourcePage, claim: Claim) -> bool:
    return all(
        symbol in page.text or code in page.words for symbol, code in _CURRENCIES.items() if symbol in claim.text
    )


def _numbers_fit(page: SourcePage, claim: Claim) -> bool:
    return all(
        _number_fits(page, claim.terms, index) for index, term in enumerate(claim.terms) if term.kind == "number"
    )


def _number_fits(page: SourcePage, terms: tuple[Term, ...], index: int) -> bool:
    """Near the number on the page stands something of what is near it in the claim, and its unit if the page has it."""
    number, following = terms[index], terms[index + 1 : index + 4]
    neighbours = [*terms[max(index - 3, 0) : index], *following]
    unit = following[0] if following and following[0].follows_number else None
    if unit is not None and page.holds(unit) and unit.text.casefold() not in MAGNITUDES:
        if not page.holds_near(number, [unit], distance=_NEAR_UNITS):
            return False
        neighbours.remove(unit)
    # Parts of a date are always near each other: that says nothing about what the date is of.
    words = [term for term in neighbours if term.kind != "number"]
    is_near = page.holds_near(number, words or neighbours, distance=_NEAR_NUMBERS)
    return is_near or _stands_in_its_sentence(page, number, terms)


def _stands_in_its_sentence(page: SourcePage, number: Term, terms: tuple[Term, ...]) -> bool:
    """Whether a sentence of the page has the number and half the words of the claim, as where a date was moved."""
    words = index_keys(term for term in terms if term.kind != "number")
    return any(
        number.key in sentence.keys and 2 * len(words & sentence.keys) >= len(words)
        for sentence in page.sentences
        if sentence.is_prose
    )


def _numbers_belong_together(page: SourcePage, claim: Claim) -> bool:
    """The numbers of a phrase stand in one sentence, or all in lines of a table, whose headings are lines as well."""
    return all(_share_a_sentence(page, terms_of(phrase)) for phrase in _PHRASE.split(claim.text))


def _share_a_sentence(page: SourcePage, terms: list[Term]) -> bool:
    numbers = {term.key for term in terms if term.kind == "number"}
    in_lines = frozenset().union(*(sentence.keys for sentence in page.sentences if not sentence.is_prose))
    return numbers <= in_lines or any(numbers <= sentence.keys for sentence in page.sentences)


def _names_fit(page: SourcePage, claim: Claim) -> bool:
    """Names that stand side by side, as a first and a last name do, stand near each other on the page."""
    return all(
        page.holds_near(name, [other], distance=_NEAR_NAMES)
        for name, other in itertools.pairwise(claim.terms)
        if name.kind == other.kind == "name" and not other.after_break
    )
