"""Sentences: of an answer as it streams, and of a page whose lines were broken by its layout."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from mmserve.pipelines.words import MONTHS, listed

_ABBREVIATIONS = listed(
    "mr mrs ms dr prof st sr jr no nos vs etc inc ltd co corp dept fig p pp ca approx e.g i.e a.m p.m u.s u.k "
    "jan feb mar apr jun jul aug sep sept oct nov dec nr bzw z.b d.h u.a usw str tel abs art e.v "
    "m mme mlle av env núm pág"
)
_END = re.compile(r"(?:[.!?…]+[\"'”’»)\]]*(?=\s|$))|(?:[。！？]+[」』”]*)")
_LIST_MARK = re.compile(r"\s*(?:[-*•·–]|\d{1,2}[.)])\s+")
_PAGE_MARK = re.compile(
    r"\s*[\[(]\s*(?:pp?|pages?|seiten?|s)\b\.?\s*\d+(?:\s*(?:[,;&–-]|and|und|to|bis)\s*(?:pp?\.?\s*)?\d+)*\s*[\])]",
    re.IGNORECASE,
)
_MIN_PARAGRAPH_WIDTH = 40
# A line that goes on in lower case was only wrapped.
_LINE_END = re.compile(r"\n(?=\n|\s*[^\s\W_a-zß-ÿ]|\s*[^\w\s])")
_NEXT_WORD = re.compile(r"\s+\S+\s|\n")
_EMPHASIS = re.compile(r"\*\*|__|`+|^\s*#{1,6}\s+", re.MULTILINE)
_WORD_BREAK = re.compile(r"(\w)[-\u00ad\u2010]\n(?=[a-zà-ÿ])")


@dataclass(frozen=True)
class Statement:
    """One sentence of an answer, without page marks. `is_item` is of the first one of a list's item."""

    text: str
    is_item: bool = False


class StatementStream:
    """Text deltas -> statements, each as soon as it is complete."""

    def __init__(self) -> None:
        self._pending = ""
        self._at_line_start = True

    def push(self, delta: str) -> list[Statement]:
        self._pending += delta
        statements: list[Statement] = []
        while (end := self._next_end()) is not None:
            piece, self._pending = self._pending[:end], self._pending[end:]
            statements += self._take(piece)
        return statements

    def finish(self, *, is_cut: bool) -> list[Statement]:
        """What is left; of an answer that was cut off only a whole sentence."""
        piece, self._pending = self._pending, ""
        if is_cut and not _END.search(piece.rstrip()[-4:]):
            return []
        return self._take(piece)

    def _next_end(self) -> int | None:
        """Where the first complete sentence or line ends. The end of what there is may still go on."""
        line_end = _LINE_END.search(self._pending)
        line = self._pending[: line_end.start()] if line_end else self._pending
        for end in sentence_ends(line):
            if self._is_settled(end):
                return end
        return line_end.end() if line_end else None

    def _is_settled(self, end: int) -> bool:
        """After a full stop the whole next word has to be seen: `14. M` may become `14. May`."""
        rest = self._pending[end:]
        return bool(_NEXT_WORD.match(rest)) if self._pending[end - 1] == "." else bool(rest)

    def _take(self, piece: str) -> list[Statement]:
        starts_line, self._at_line_start = self._at_line_start, piece.endswith("\n")
        mark = _LIST_MARK.match(piece) if starts_line else None
        text = clean_statement(piece[mark.end() :] if mark else piece)
        if not text:
            self._at_line_start = self._at_line_start or starts_line
            return []
        return [Statement(text, mark is not None)]


def clean_statement(text: str) -> str:
    """Without emphasis marks, page marks of the model's own, and stray spaces."""
    text = _PAGE_MARK.sub("", _EMPHASIS.sub("", text))
    return re.sub(r"\s+([.,;!?])", r"\1", " ".join(text.split())).strip()


def sentence_ends(line: str) -> Iterator[int]:
    """Positions after which a new sentence may start. `Dr.`, `No. 4`, `14. März` and initials end none."""
    for match in _END.finditer(line):
        rest = line[match.end() :].lstrip()
        if match[0] != "." or not rest or not _goes_on(line[: match.start()].split(), rest):
            yield match.end()


def _goes_on(before: list[str], rest: str) -> bool:
    """Whether the full stop between the words `before` and the `rest` is within a sentence."""
    last = before[-1].lstrip("([\"'“‘«").casefold() if before else ""
    if last.isdigit() and len(last) < 3:
        return len(before) == 1 or rest.split()[0].strip(".,").casefold() in MONTHS
    return rest[0].islower() or last in _ABBREVIATIONS or (len(last) == 1 and last.isalpha())


def split_sentences(text: str) -> list[str]:
    """Sentences of one paragraph."""
    sentences, start = [], 0
    for end in sentence_ends(text):
        sentences.append(text[start:end].strip())
        start = end
    return [sentence for sentence in [*sentences, text[start:].strip()] if sentence]


def page_sentences(text: str) -> list[str]:
    """Sentences of a page: lines that the layout broke are joined, headings and table rows stay for themselves."""
    lines = [line.strip() for line in _WORD_BREAK.sub(r"\1", text).splitlines()]
    width = max((len(line) for line in lines), default=0)
    blocks: list[str] = []
    previous = ""
    for line in lines:
        if previous and line and _is_continued(previous, line, width):
            blocks[-1] += " " + line
        elif line:
            blocks.append(line)
        previous = line
    return [sentence for block in blocks for sentence in split_sentences(block)]


def _is_continued(line: str, following: str, width: int) -> bool:
    """Whether a line was broken because the next word did not fit."""
    if line.endswith((".", "!", "?", ":")) or _LIST_MARK.match(following):
        return False
    is_full = len(line) + 1 + len(following.split()[0]) > 0.9 * width
    return is_full and (width >= _MIN_PARAGRAPH_WIDTH or following[0].islower())
