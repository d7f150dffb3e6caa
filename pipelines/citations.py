"""Where a statement was read: the pages that support it, or the finding that none does.

A model's own page marks are not believed, and neither are its statements. A statement is supported by a page if

- each of its numbers, dates, codes and names stands on the page (`£4,111.00` is `4111`, `two` is `2`, `März 2025` is
  `March 2025`; a percentage is no plain number);
- each number stands there near a word or number that it stands beside in the statement: `21 July` on the page does not
  support `within 21 days`; and names that stand side by side in the statement do so on the page;
- four fifths of its words, weighted by rarity, are among those numbers and names, or in the three sentences of the page
  that fit best;
- the sentence that says nearly the same does not say it with a negation that the statement lacks, or the other way round.

One page has to support all of it; else the statement is cut into its clauses and each is looked up for itself. A
statement in another language than the page is judged by its numbers and names alone, and needs at least one.

This is evidence, not proof: it finds what was made up or mixed up, and it cannot follow an argument.
"""

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from mmserve.pipelines.sources import SourcePage, Sources
from mmserve.pipelines.terms import Term, claims_of, terms_of
from mmserve.pipelines.words import NEGATIONS, guess_language

_MIN_COVERAGE = 0.8
_SAME_SENTENCE = 0.75
_MAX_PASSAGE_SENTENCES = 3
_MAX_CANDIDATE_PAGES = 12
_MAX_CITED_PAGES = 3
_CURRENCIES = "£$€¥₹"
_CLAUSE = re.compile(r";\s+|,?\s+(?:and|but|while|und|aber|während|et|mais|y|pero)\s+")
_KIND_WEIGHT = {"number": 4.0, "name": 3.0, "word": 1.0, "function": 0.0}


@dataclass(frozen=True)
class _Claim:
    """A statement, or a clause of one, as it is looked up."""

    terms: tuple[Term, ...]
    text: str
    is_negated: bool
    language: str | None

    @classmethod
    def of(cls, text: str) -> "_Claim":
        words = [term.text.casefold() for term in terms_of(text)]
        is_negated = any(word in NEGATIONS for word in words)
        return cls(tuple(claims_of(text)), text, is_negated, guess_language(words))

    @property
    def anchors(self) -> list[Term]:
        return [term for term in self.terms if term.kind in ("number", "name")]


class CitationFinder:
    """Looks statements up in the pages of one document."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def find(self, statement: str) -> tuple[int, ...]:
        """The numbers of the pages that support the statement, in ascending order; empty if none does."""
        claim = _Claim.of(statement)
        if not claim.terms or self._names_unknown_subject(claim):
            return ()
        page = self._best_page(claim)
        if page is not None:
            return (page,)
        return self._pages_by_clause(statement)

    def _names_unknown_subject(self, claim: _Claim) -> bool:
        """A statement's first word is capitalised anyway; one that no page knows is taken for an invented name."""
        first = claim.terms[0]
        is_subject = claim.text.lstrip("\"'“‘«").startswith(first.text) and first.is_capital and first.kind == "word"
        is_foreign = claim.language not in (None, self._sources.language)
        return is_subject and not is_foreign and not first.text.endswith("ly") and not self._sources.knows(first.key)

    def _best_page(self, claim: _Claim) -> int | None:
        for page in self._candidates(claim):
            if self._supports(page, claim):
                return page.number
        return None

    def _pages_by_clause(self, statement: str) -> tuple[int, ...]:
        clauses = [clause for clause in map(_Claim.of, _CLAUSE.split(statement)) if clause.terms]
        if len(clauses) < 2:
            return ()
        pages = [self._best_page(clause) for clause in clauses]
        found = {page for page in pages if page is not None}
        is_read = None not in pages and 2 <= len(found) <= _MAX_CITED_PAGES
        return tuple(sorted(found)) if is_read else ()

    def _candidates(self, claim: _Claim) -> list[SourcePage]:
        """Pages that have all numbers and names, best first."""
        pages = [page for page in self._sources.pages.values() if all(page.holds(term) for term in claim.anchors)]
        pages.sort(key=lambda page: (-self._weight(term for term in claim.terms if page.holds(term)), page.number))
        return pages[:_MAX_CANDIDATE_PAGES]

    def _weight(self, terms: Iterable[Term]) -> float:
        return sum(_KIND_WEIGHT[term.kind] * self._sources.rarity(term.key) for term in terms)

    def _supports(self, page: SourcePage, claim: _Claim) -> bool:
        if not _currencies_agree(page, claim) or not _numbers_fit(page, claim) or not _names_fit(page, claim):
            return False
        if None not in (claim.language, page.language) and claim.language != page.language:
            return bool(claim.anchors)
        return self._covers(page, claim)

    def _covers(self, page: SourcePage, claim: _Claim) -> bool:
        """Whether numbers, names and the best fitting sentences of the page have nearly all that is claimed."""
        wanted = {key: self._sources.rarity(key) for key in _content_keys(claim.terms)}
        sentences = list(page.sentences)
        missing = dict.fromkeys(wanted)
        for rank in range(min(_MAX_PASSAGE_SENTENCES, len(sentences))):
            best = max(sentences, key=lambda sentence: sum(wanted[key] for key in sentence.keys & missing.keys()))
            share = sum(wanted[key] for key in best.keys & wanted.keys()) / sum(wanted.values())
            if rank == 0 and share >= _SAME_SENTENCE and best.is_negated != claim.is_negated:
                return False
            missing = {key: None for key in missing if key not in best.keys}
            sentences.remove(best)
        for key in {key for term in claim.anchors for key in _content_keys((term,))}:
            missing.pop(key, None)
        return sum(wanted[key] for key in missing) <= (1.0 - _MIN_COVERAGE) * sum(wanted.values())


def _content_keys(terms: Iterable[Term]) -> set[str]:
    """Keys as sentences have them: a name goes by its stem."""
    keys: set[str] = set()
    for term in terms:
        keys.update([key.key for key in terms_of(term.text)] if term.kind == "name" else [term.key])
    return keys


def _currencies_agree(page: SourcePage, claim: _Claim) -> bool:
    return all(symbol in page.text for symbol in _CURRENCIES if symbol in claim.text)


def _numbers_fit(page: SourcePage, claim: _Claim) -> bool:
    terms = claim.terms
    return all(
        page.holds_near(term, [*terms[max(index - 3, 0) : index], *terms[index + 1 : index + 4]])
        for index, term in enumerate(terms)
        if term.kind == "number"
    )


def _names_fit(page: SourcePage, claim: _Claim) -> bool:
    """Names that stand side by side, as a first and a last name do, stand near each other on the page."""
    return all(
        page.holds_near(name, [other])
        for name, other in itertools.pairwise(claim.terms)
        if name.kind == other.kind == "name" and not other.after_break
    )
