"""Sentences of the pages themselves, chosen to stand where the model's own are not supported."""

import math
from collections import Counter
from collections.abc import Collection, Iterator

from mmserve.pipelines.repetition import Novelty
from mmserve.pipelines.sources import Sources, SourceSentence
from mmserve.pipelines.terms import Term, terms_of

_ANAPHORA = frozenset(
    "it they he she this these that those such his her their its i we you however but er sie es dies diese dieser "
    "il elle ils elles ce cela".split()
)
_KEY_FIELDS = frozenset(
    "total amount sum due balance date invoice number betrag summe gesamt datum fällig rechnung montant échéance "
    "facture importe fecha".split()
)
_MIN_WORDS, _MAX_WORDS = 5, 45
_READ_ALREADY = 0.45


def choose_extracts(
    sources: Sources, count: int, *, novelty: Novelty, cited_pages: Collection[int] = ()
) -> list[SourceSentence]:
    """Up to `count` sentences in the order of the pages, from pages not cited yet where that costs little.

    Prose is preferred; a document without any (a receipt, a table) gives its heading and its lines with figures.
    """
    scores = _prose_scores(sources) or _line_scores(sources)
    num_taken = Counter(cited_pages)
    chosen: list[SourceSentence] = []
    while scores and len(chosen) < count:
        best = max(scores, key=lambda sentence: scores[sentence] * _READ_ALREADY ** num_taken[sentence.page])
        del scores[best]
        if novelty.is_new(best.text):
            chosen.append(best)
            num_taken[best.page] += 1
    places = {sentence: place for place, sentence in enumerate(sources.sentences)}
    return sorted(chosen, key=lambda sentence: places[sentence])


def _prose_scores(sources: Sources) -> dict[SourceSentence, float]:
    sentences = sources.sentences
    num_with = Counter(key for sentence in sentences for key in sentence.keys)
    copies = Counter(sentence.text for sentence in sentences)
    scores: dict[SourceSentence, float] = {}
    for page in sources.pages.values():
        prose = [sentence for sentence in page.sentences if _is_prose(sentence.text) and copies[sentence.text] == 1]
        for rank, sentence in enumerate(prose):
            lead = 1.3 if rank == 0 else 1.0
            scores[sentence] = lead * _score(terms_of(sentence.text), num_with)
    return scores


def _is_prose(text: str) -> bool:
    num_words = len(text.split())
    return _MIN_WORDS <= num_words <= _MAX_WORDS and text[-1] in ".!。" and not text[0].islower()


def _score(terms: list[Term], num_with: Counter[str]) -> float:
    """Words that the document comes back to, and figures and names; long sentences gain little by their length."""
    content = {term.key: term for term in terms if term.kind != "function"}
    weights = [1.0 + math.log(num_with[key]) for key in content]
    figures = sum(term.kind == "number" for term in content.values())
    names = sum(term.is_capital for term in content.values())
    score = (sum(weights) + 1.5 * min(figures, 4) + 0.5 * min(names, 4)) / math.sqrt(8 + len(terms))
    return score * (0.4 if terms and terms[0].text.casefold() in _ANAPHORA else 1.0)


def _line_scores(sources: Sources) -> dict[SourceSentence, float]:
    scores: dict[SourceSentence, float] = {}
    for page in sources.pages.values():
        scores.update({line: score for line, score in _page_line_scores(page.sentences) if score > 0})
    return scores


def _page_line_scores(lines: tuple[SourceSentence, ...]) -> Iterator[tuple[SourceSentence, float]]:
    for rank, line in enumerate(lines):
        terms = terms_of(line.text)
        has_words = any(term.kind == "word" and len(term.text) > 2 for term in terms)
        is_key_field = any(term.text.casefold() in _KEY_FIELDS for term in terms)
        has_figure = any(term.kind == "number" for term in terms)
        yield line, has_words * ((rank == 0) * 3.0 + has_figure * (1.0 + 2.0 * is_key_field))
