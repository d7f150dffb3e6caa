"""A question to a document: what it asks for, what bears on it, and which sentence of a page plainly answers it."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from mmserve.pipelines.extracts import Extract
from mmserve.pipelines.sources import SourcePage, Sources, SourceSentence, index_keys
from mmserve.pipelines.terms import Term, claims_of, terms_of
from mmserve.pipelines.words import FUNCTION_WORDS, listed

Asked = Literal["date", "amount", "number", "anything"]

# Words that say what kind of thing is asked for: the page seldom has them.
_KINDS = listed(
    "amount number date day year price cost costs value sum name betrag nummer datum preis kosten wert summe montant "
    "numéro prix importe número fecha precio importo numero data prezzo"
)
_ASKING = _KINDS | listed(
    "what when where which who whom whose why how much many long often high large big old tell give list show find "
    "please say does do did answer question "
    "wer wen wem wessen was wann wo wohin woher welche welcher welches welchen warum wieso wie viel viele hoch lange "
    "nenne gib qui quoi quand où combien quel quelle quels quelles pourquoi comment quién qué cuándo dónde cuánto "
    "cuánta cuántos cuántas cuál cuáles chi quando dove quanto quanti quale quali perché wat wanneer waar hoeveel welk"
)
_WHAT = r"\b(?:what|which)\b[^?.]{0,60}?\b"
_DATE = re.compile(
    rf"\bwhen\b|{_WHAT}(?:date|day|year|deadline)\b|\b(?:wann|datum|quand|cuándo|fecha|quando|wanneer)\b",
    re.IGNORECASE,
)
_AMOUNT = re.compile(
    rf"\bhow much\b|{_WHAT}(?:price|costs?|amount|total|sum|fee|rent|salary|revenue|profit)\b|^\W*(?:the )?total\b"
    r"|\b(?:wie ?viel|wie hoch|was kostet|betrag|preis|summe|combien|montant|prix|cuánto|importe|precio)\b",
    re.IGNORECASE,
)
_NUMBER = re.compile(
    rf"\bhow (?:many|long|often|old|high|large|big)\b|{_WHAT}(?:number|percentage|share|rate)\b"
    r"|\b(?:wie (?:viele|lange|oft|alt|groß)|nummer|anzahl|cuántos|cuántas|quanti|numéro|número|numero|hoeveel)\b",
    re.IGNORECASE,
)
_MONEY = re.compile(
    r"(?:[£$€¥₹]|\b(?:EUR|GBP|USD|CHF|JPY))\s?\d|\d\s?(?:[£$€¥₹]|(?:EUR|GBP|USD|CHF|JPY|euros?|pounds?|dollars?)\b)"
    r"|\d[.,]\d\d\b",
    re.IGNORECASE,
)
_ANY_DATE = re.compile(r"\b(?:\d{1,2}[./-]\d{1,2}[./-]\d{2,4}|\d{4}-\d\d-\d\d|(?<![\d-])(?:19|20)\d\d(?![\d-]))\b")
_MIN_SHARE = 0.75
_MIN_SAID_BESIDE = 2


@dataclass(frozen=True)
class Question:
    text: str

    @cached_property
    def terms(self) -> tuple[Term, ...]:
        """What the question is about, without the words that ask."""
        return tuple(term for term in claims_of(self.text) if term.text.casefold() not in _ASKING)

    @cached_property
    def keys(self) -> frozenset[str]:
        return frozenset(index_keys(self.terms))

    @cached_property
    def asked(self) -> Asked:
        """By its words; `anything` if they do not say."""
        if _DATE.search(self.text):
            return "date"
        if _AMOUNT.search(self.text):
            return "amount"
        return "number" if _NUMBER.search(self.text) else "anything"

    def _is_foreign_to(self, page: SourcePage) -> bool:
        """Whether it seems to be in another language: none of its words is one of that language's small words.

        Of a page whose language is not clear, none of its words stands there.
        """
        if page.language is None:
            return self.keys.isdisjoint(page.places)
        return FUNCTION_WORDS[page.language].isdisjoint(term.text.casefold() for term in terms_of(self.text))

    def bears_on(self, page: SourcePage, statement: str, *, is_fragment: bool) -> bool:
        """Whether a statement that was read on the page can be an answer at all.

        The page has to speak of something that the question speaks of; of a fragment such as an amount, the lines
        around it on the page. A question in another language than the page cannot be judged by its words.
        """
        if not self.keys or self._is_foreign_to(page):
            return True
        around = _around(page, statement) if is_fragment else set(page.places)
        return not self.keys.isdisjoint(around | index_keys(claims_of(statement)))

    def without_kinds(self, text: str) -> str:
        """`text` without the question's words for kinds of things: `the total amount is £5` was read as `Total £5`."""
        return " ".join(word for word in text.split() if word.strip(",;:").casefold() not in self._kinds)

    @cached_property
    def _kinds(self) -> frozenset[str]:
        return _KINDS.intersection(term.text.casefold() for term in terms_of(self.text))

    def score(self, sources: Sources, text: str) -> float:
        """How much of the question `text` has, and whether it has the kind of thing that is asked for; 0 to 2."""
        return self._share(sources, index_keys(terms_of(text))) + self.is_answered_in_kind(text)

    def _share(self, sources: Sources, keys: Iterable[str]) -> float:
        total = sum(sources.rarity(key) for key in self.keys)
        return sum(sources.rarity(key) for key in self.keys.intersection(keys)) / total if total else 0.0

    def is_answered_in_kind(self, text: str) -> bool:
        """Whether `text` has a date, an amount or a number that the question has not, where it asks for one."""
        numbers = {term.key for term in terms_of(text) if term.kind == "number"} - self.keys
        if self.asked == "date":
            return any(key.startswith("month") for key in numbers) or bool(_ANY_DATE.search(text))
        if self.asked == "amount":
            return bool(numbers) and bool(_MONEY.search(text))
        return self.asked == "anything" or bool(numbers)

    def plain_answer(self, sources: Sources, within: Sequence[int] | None = None) -> Extract | None:
        """The sentence of a page that answers beyond doubt: it has nearly all that the question speaks of, each name
        and number of it, and something more, of the kind that is asked for. A question of a single word that does not
        say what it asks for has none."""
        is_vague = self.asked == "anything" and len(self.keys) < 2
        if not self.keys or is_vague:
            return None
        found = [
            (
                self._share(sources, sentence.keys),
                len(self._kinds.intersection(sentence.text.casefold().split())),
                -len(sentence.text),
                Extract(page.number, place, sentence.text),
            )
            for page in sources.pages(sources.quotable(within))
            for place, sentence in enumerate(page.sentences)
            if self._is_plain(sentence)
        ]
        best = max((candidate for candidate in found if candidate[0] >= _MIN_SHARE), default=None)
        return None if best is None else best[-1]

    def _is_plain(self, sentence: SourceSentence) -> bool:
        anchors = index_keys(term for term in self.terms if term.kind in ("name", "number"))
        says_more = self.asked != "anything" or len(sentence.keys - self.keys) >= _MIN_SAID_BESIDE
        is_question = sentence.text.endswith("?")
        return says_more and not is_question and anchors <= sentence.keys and self.is_answered_in_kind(sentence.text)


def _around(page: SourcePage, statement: str) -> set[str]:
    """Keys of the sentence or line that has most of a statement, and of its neighbours."""
    keys, sentences = index_keys(claims_of(statement)), page.sentences
    best = max(range(len(sentences)), key=lambda place: len(keys & sentences[place].keys))
    return {key for sentence in sentences[max(best - 1, 0) : best + 2] for key in sentence.keys}
