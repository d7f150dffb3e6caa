"""Text -> terms: the numbers, names and words by which a statement can be found on a page."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from mmserve.pipelines.words import (
    ALL_FUNCTION_WORDS,
    CONNECTING_WORDS,
    MONTHS,
    NEGATIONS,
    NUMERALS,
)

TermKind = Literal["number", "name", "word", "function"]

_TOKEN = re.compile(
    r"(?P<code>[^\W\d_]{1,6}-?\d[^\W_]*(?:-[^\W_]+)*)"
    r"|(?P<number>\d+(?:[.,:/-]\d+)*)(?P<percent>\s?[%‰]|\s(?:per\s?cent|prozent|pour\s?cent|procent)\b)?"
    r"|(?P<word>[^\W\d_]+(?:['’][^\W\d_]+)*)"
    r"|(?P<break>[^\w\s'’&-])",
    re.IGNORECASE,
)
_GROUPED = re.compile(r"\d{1,3}(?:[.,]\d{3})+")
_DECIMAL = re.compile(r"(\d+(?:[.,]\d{3})*)[.,](\d{1,2})")
_WITHOUT_SPACES = re.compile(r"[\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]")
_SUFFIXES = (
    *("ations", "ation", "ments", "ment", "ings", "ions", "ing", "ion", "ies", "ied"),
    *("als", "al", "ed", "es", "er", "en", "em", "ly", "e", "s", "n", "y"),
)


@dataclass(frozen=True, slots=True)
class Term:
    """`key` is what two spellings of the same thing share. `after_break`: punctuation other than a hyphen precedes it.

    `follows_number`: the word stands right after a number, as its unit does.
    """

    key: str
    kind: TermKind
    text: str
    is_capital: bool = False
    after_break: bool = True
    follows_number: bool = False


def terms_of(text: str) -> list[Term]:
    """Numbers (also months beside numbers, and numerals), words and codes of `text`, in order."""
    terms: list[Term] = []
    after_break = True
    for match in _TOKEN.finditer(text):
        if match["break"]:
            after_break = True
            continue
        for term in _terms_of_token(match, after_break):
            terms.append(term)
        after_break = False
    return [_as_month(terms, index) for index in range(len(terms))]


def _terms_of_token(match: re.Match[str], after_break: bool) -> Iterator[Term]:
    if code := match["code"]:
        yield Term(code.casefold().replace("-", ""), "number", code, after_break=after_break)
    elif number := match["number"]:
        mark = "%" if match["percent"] else ""
        for key in number_keys(number):
            yield Term(key + mark, "number", number + mark, after_break=after_break)
    else:
        yield from _words(match["word"], after_break)


def _words(word: str, after_break: bool) -> Iterator[Term]:
    if _WITHOUT_SPACES.search(word):
        yield from (Term(word[i : i + 2], "word", word[i : i + 2]) for i in range(max(len(word) - 1, 1)))
        return
    word = re.sub(r"['’]s?$|['’]s\b", "", word)
    folded = word.casefold()
    if folded in NUMERALS:
        yield Term(NUMERALS[folded], "number", word, after_break=after_break)
    elif folded in ALL_FUNCTION_WORDS or folded in NEGATIONS or len(folded) < 2:
        yield Term(folded, "function", word, is_capital=word[:1].isupper(), after_break=after_break)
    else:
        yield Term(stem(folded), "word", word, is_capital=word[:1].isupper(), after_break=after_break)


def number_keys(number: str) -> list[str]:
    """`4,111.00` -> 4111; `8.450` -> 8450; `2.50` -> 2.5; `14/06/2025` and `2025-0417` -> their parts."""
    if _GROUPED.fullmatch(number):
        return [re.sub(r"[.,]", "", number)]
    if decimal := _DECIMAL.fullmatch(number):
        whole, fraction = re.sub(r"[.,]", "", decimal[1]), decimal[2].rstrip("0")
        return [f"{whole}.{fraction}" if fraction else whole]
    return [part.lstrip("0") or "0" for part in re.split(r"[.,:/-]", number)]


def stem(folded: str) -> str:
    """A crude stem: enough for `inspected` to find `inspection`."""
    for suffix in _SUFFIXES:
        if folded.endswith(suffix) and len(folded) - len(suffix) >= 4:
            return folded[: -len(suffix)]
    return folded


def _as_month(terms: list[Term], index: int) -> Term:
    """A month's name beside a number is a number: dates are checked as such, in any of the languages."""
    term = terms[index]
    month = MONTHS.get(term.text.casefold()) if term.is_capital or term.kind == "word" else None
    near = terms[max(index - 1, 0) : index + 2]
    if month is None or not any(other.text[:1].isdigit() for other in near):
        return term
    return Term(f"month {month}", "number", term.text, after_break=term.after_break)


def claims_of(text: str) -> list[Term]:
    """The terms of a statement that have to stand on a page; its names are told from other words.

    A capitalised word is a name; the first one only if a capitalised word follows it.
    """
    terms = terms_of(text)
    return [_as_claim(terms, index) for index, term in enumerate(terms) if _claims_something(term)]


def _claims_something(term: Term) -> bool:
    return term.kind != "function" and not (term.kind == "word" and term.text.casefold() in CONNECTING_WORDS)


def _as_claim(terms: list[Term], index: int) -> Term:
    term = terms[index]
    following = terms[index + 1] if index + 1 < len(terms) else None
    is_followed = following is not None and following.is_capital and not following.after_break
    if term.is_capital and term.kind == "word" and (index > 0 or is_followed):
        return replace(term, key=term.text.casefold(), kind="name")
    follows_number = index > 0 and terms[index - 1].kind == "number" and not term.after_break
    return replace(term, follows_number=follows_number and term.kind == "word")
