"""Sentences of the pages themselves, chosen to stand where the model's own are not supported."""

import heapq
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from mmserve.pipelines.repetition import Novelty
from mmserve.pipelines.sources import SourcePage, Sources, SourceSentence
from mmserve.pipelines.terms import Term, terms_of
from mmserve.pipelines.words import ALL_FUNCTION_WORDS, listed

_WEAK_STARTS = listed(
    "dear thank thanks it they he she this these that those such his her their its i we you however but er sie es dies "
    "diese dieser il elle ils elles ce cela"
)
_KEY_FIELDS = listed(
    "total amount sum due balance date invoice number betrag summe gesamt datum fällig rechnung montant échéance "
    "facture importe fecha"
)
_TOTAL = re.compile(
    r"(?:(?:grand )?total|amount|balance|gesamt\w*|rechnungsbetrag|summe|montant|total) ?[^\W\d]*:? "
    r"(?:[£$€]|EUR|GBP|USD|CHF) ?\d[\d.,]*\d(?: ?€)?",
    re.IGNORECASE,
)
_MAX_TOTALS = 1
_MIN_WORDS, _MAX_WORDS = 5, 45
_CANDIDATES_PER_PAGE = 8
# The second sentence of a page has to be this much better than the first of another one.
_PAGE_CITED_ALREADY = 0.45


@dataclass(frozen=True, order=True)
class Extract:
    """A sentence of a page, and its place there."""

    page: int
    place: int
    text: str


def choose_extracts(
    sources: Sources,
    count: int,
    *,
    novelty: Novelty,
    cited_pages: Collection[int] = (),
    within: Sequence[int] | None = None,
) -> list[Extract]:
    """Up to `count` sentences in the order of the pages, from pages not cited yet where that costs little.

    Prose is preferred; a document without any (a receipt, a table) gives its heading and its lines with figures.
    """
    if count < 1:
        return []
    numbers = sources.quotable(within)
    scores = _prose_scores(sources, numbers) or _line_scores(sources, numbers)
    num_taken = Counter(cited_pages)
    chosen: list[Extract] = []
    while scores and len(chosen) < count:
        best = max(scores, key=lambda extract: scores[extract] * _PAGE_CITED_ALREADY ** num_taken[extract.page])
        del scores[best]
        if novelty.is_new(best.text) and all(best.text != other.text for other in chosen):
            chosen.append(best)
            num_taken[best.page] += 1
    return sorted(chosen)


def _prose_scores(sources: Sources, numbers: Sequence[int]) -> dict[Extract, float]:
    """The best few of each page. A sentence that stands on several pages is a header, and none of them."""
    num_with: Counter[str] = Counter()
    copies: Counter[str] = Counter()
    for page in sources.pages(numbers):
        num_with.update(key for sentence in page.sentences for key in sentence.keys)
        copies.update({sentence.text for sentence in page.sentences if _is_prose(sentence)})
    scores: dict[Extract, float] = {}
    for page in sources.pages(numbers):
        prose = [(place, s) for place, s in enumerate(page.sentences) if _is_prose(s) and copies[s.text] == 1]
        ranked = [
            (_score(terms_of(sentence.text), num_with) * (1.15 if rank == 0 else 1.0), place, sentence.text)
            for rank, (place, sentence) in enumerate(prose)
        ]
        best = heapq.nlargest(_CANDIDATES_PER_PAGE, ranked)
        scores.update({Extract(page.number, place, text): score for score, place, text in best})
    if scores:
        scores.update(dict.fromkeys(_total_lines(sources, numbers), max(scores.values())))
    return scores


def _total_lines(sources: Sources, numbers: Sequence[int]) -> list[Extract]:
    """Lines such as `Total due £4,933.20`: prose that goes with them seldom says it again."""
    lines = ((page.number, place, line) for page in sources.pages(numbers) for place, line in enumerate(page.sentences))
    return [
        Extract(number, place, line.text)
        for number, place, line in lines
        if _TOTAL.fullmatch(line.text) and not _is_prose(line)
    ][:_MAX_TOTALS]


def _is_prose(sentence: SourceSentence) -> bool:
    words = sentence.text.split()
    num_function_words = sum(word.casefold() in ALL_FUNCTION_WORDS for word in words)
    is_whole = sentence.text[-1] in ".!。" and not sentence.text[0].islower()
    return is_whole and _MIN_WORDS <= len(words) <= _MAX_WORDS and num_function_words >= 2


def _score(terms: Sequence[Term], num_with: Counter[str]) -> float:
    """Words that the document comes back to, and figures and names; long sentences gain little by their length."""
    content = {term.key: term for term in terms if term.kind != "function"}
    weight = sum(1.0 + math.log(num_with[key]) for key in content)
    figures = min(sum(_figure_weight(term) for term in content.values()), 4.0)
    num_names = sum(term.is_capital for term in content.values())
    score: float = (weight + 1.5 * figures + 0.5 * min(num_names, 4)) / (8 + len(terms)) ** 0.65
    return score * (0.4 if terms[0].text.casefold() in _WEAK_STARTS else 1.0)


def _figure_weight(term: Term) -> float:
    """Amounts and percentages say more than years and days, and a date is no three figures."""
    if term.kind != "number" or term.key.startswith("month"):
        return 0.0
    is_amount = (
        "%" in term.key or "." in term.key or (term.key.isdigit() and (len(term.key) > 4 or int(term.key) > 2100))
    )
    return 1.5 if is_amount else 0.5


def _line_scores(sources: Sources, numbers: Sequence[int]) -> dict[Extract, float]:
    scored = (pair for page in sources.pages(numbers) for pair in _scored_lines(page))
    return {extract: score for extract, score in scored if score > 0}


def _scored_lines(page: SourcePage) -> Iterable[tuple[Extract, float]]:
    for place, line in enumerate(page.sentences):
        terms = terms_of(line.text)
        has_words = any(term.kind == "word" and len(term.text) > 2 for term in terms)
        is_key_field = any(term.text.casefold() in _KEY_FIELDS for term in terms)
        has_figure = any(term.kind == "number" for term in terms)
        score = (place == 0) * 3.0 + has_figure * (1.0 + 2.0 * is_key_field)
        yield Extract(page.number, place, line.text), score if has_words else 0.0
