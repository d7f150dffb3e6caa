"""Where a value was read: looked up on the pages in whatever way it is written there.

A number is found as its digits (4933.2 as `4.933,20` or `£4,933.20`, 20 as `20%`), a date such as 2025-05-03 as `3 May
2025` or `03/05/25`, other text word for word but for case, spaces and kinds of quotes and dashes; if that fails, as a
statement is (see `citations`). Of several pages the one on which words of the field's name are near counts, else the
first.
"""

import math
import re
import unicodedata
from collections.abc import Iterable, Sequence
from datetime import date
from functools import lru_cache

from mmserve.pipelines.citations import CitationFinder
from mmserve.pipelines.sources import SourcePage, Sources
from mmserve.pipelines.terms import Term, number_keys, terms_of

Scalar = str | int | float | bool
_NEAR_NAME = 8
_MAX_COMPARED = 12
_NAME_PARTS = re.compile(r"[^\W\d_][^\W\d_A-Z]*|[A-Z]+(?![a-z])|\d+")
_ALIKE = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"', "–": "-", "—": "-", "‑": "-", "\u00ad": None})
# Ways to write that there is nothing.
_NOTHING = re.compile(
    r"[\W_]*(?:n/?a|none|null|nil|unknown|undefined|not\s\w+(?:\s\w+){0,4}|k\.\s?a)?[\W_]*", re.IGNORECASE
)


def says_nothing(value: str) -> bool:
    """Whether the text only says that there is no value: empty, `N/A`, `not specified`."""
    return bool(_NOTHING.fullmatch(value))


class ValueFinder:
    """Looks values up in the pages of a document that `within` names."""

    def __init__(self, sources: Sources, within: Sequence[int]) -> None:
        self._sources = sources
        self._within = sorted(set(within).intersection(sources.page_numbers))
        self._statements = CitationFinder(sources, within)

    def find(self, value: Scalar, name: str) -> tuple[int, ...]:
        """The pages on which the value of the field `name` stands, empty if it stands on none."""
        if isinstance(value, bool):
            return ()
        if isinstance(value, str):
            return self._find_text(value, name)
        keys = _keys_of_number(value)
        pages = self._with_all([{key, f"{key}%"} for key in keys]) if keys else []
        return self._nearest(pages, [Term(key, "number", key) for key in keys], name)

    def _find_text(self, text: str, name: str) -> tuple[int, ...]:
        terms = terms_of(text)
        indexed = [{term.key} for term in terms if self._sources.pages_with(term.key)]
        pages = [page for page in self._with_all(indexed) if _stands_in(text, self._sources.text(page))]
        if not pages and (day := _as_date(text)) is not None:
            years = [{str(day.year), str(day.year % 100)}]
            pages = [page for page in self._with_all(years) if _has_date(self._sources.page(page), day)]
        return self._nearest(pages, terms, name) or self._statements.find(text)

    def _with_all(self, keys: Iterable[set[str]]) -> list[int]:
        """The pages that have one of each of these sets."""
        found = set(self._within)
        for either in keys:
            found &= {page for key in either for page in self._sources.pages_with(key)}
        return sorted(found)

    def _nearest(self, pages: Sequence[int], terms: Sequence[Term], name: str) -> tuple[int, ...]:
        """The first page on which words of the name are near a term of the value, else the first one."""
        words = [term for part in _NAME_PARTS.findall(name) for term in terms_of(part)]
        if words and len(pages) > 1:
            for page in self._sources.pages(pages[:_MAX_COMPARED]):
                if any(page.holds_near(term, words, distance=_NEAR_NAME) for term in terms):
                    return (page.number,)
        return tuple(pages[:1])


def _keys_of_number(value: int | float) -> list[str]:
    if not math.isfinite(value):
        return []
    # A sign is a hyphen in the text of pages, and those are no part of a number there.
    written = str(abs(value)) if isinstance(value, int) else f"{abs(value):.10f}".rstrip("0").rstrip(".")
    return number_keys(written)


@lru_cache(maxsize=128)
def _normal(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).translate(_ALIKE).casefold().split())


def _stands_in(text: str, page: str) -> bool:
    wanted = re.escape(_normal(text))
    return bool(wanted) and bool(re.search(rf"(?<!\w){wanted}(?!\w)", _normal(page)))


def _as_date(text: str) -> date | None:
    try:
        return date.fromisoformat(text.strip()[:10])
    except ValueError:
        return None


def _has_date(page: SourcePage, day: date) -> bool:
    """Day and month beside the year; a year of two digits after figures alone."""
    figures = sorted([str(day.day), str(day.month)])
    pairs = (figures, sorted([str(day.day), f"month {day.month}"]))
    keys = page.keys
    for place in page.places.get(str(day.year), ()):
        around = (keys[max(place - 2, 0) : place], keys[place + 1 : place + 3], keys[max(place - 1, 0) : place + 2 : 2])
        if any(sorted(pair) in pairs for pair in around):
            return True
    short = page.places.get(str(day.year % 100), ())
    return any(sorted(keys[max(place - 2, 0) : place]) == figures for place in short)
