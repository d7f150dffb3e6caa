"""From a model's statements to an answer: those that pages support and that bear on the question, or the finding that
the document does not say."""

import re
from collections.abc import Callable, Sequence

from mmserve.pipelines.checked_text import MIN_TERMS, CheckedText, ReadText, ends_as_sentence, num_terms
from mmserve.pipelines.question import Question
from mmserve.pipelines.refusals import is_refusal
from mmserve.pipelines.sentences import Statement
from mmserve.pipelines.sources import Sources

# It answers the question, and says nothing that could stand on a page.
_VERDICT = re.compile(r"^(?:yes|no|ja|nein|doch|oui|non|si|sì|sí|nee)\b[\s,.:;–-]+", re.IGNORECASE)


class AnswerText(CheckedText):
    """A few words are an answer, too. The first statement that says that the document does not answer ends it."""

    _min_terms = 1

    def __init__(
        self,
        question: Question,
        sources: Sources,
        *,
        max_statements: int,
        within: Sequence[int] | None = None,
        is_translation: bool = False,
        write: Callable[[str], None] = lambda _text: None,
    ) -> None:
        super().__init__(
            sources, max_statements=max_statements, within=within, is_translation=is_translation, write=write
        )
        self.has_refused = False
        self._question = question

    @property
    def has_enough(self) -> bool:
        return super().has_enough or self.has_refused

    def add(self, statement: Statement) -> None:
        if is_refusal(statement.text, is_supported=bool(self._pages_of(statement))):
            self.num_passed_over += 1
            self.has_refused = True
        else:
            super().add(statement)

    def _says_something(self, statement: Statement) -> bool:
        return _is_answer(statement)

    def _pages_of(self, statement: Statement) -> tuple[int, ...]:
        text = _VERDICT.sub("", statement.text)
        is_fragment = not ends_as_sentence(text) or num_terms(text) < MIN_TERMS
        numbers = self._finder.find(text) or self._finder.find(self._question.without_kinds(text))
        pages = map(self._sources.page, numbers)
        return tuple(page.number for page in pages if self._question.bears_on(page, text, is_fragment=is_fragment))


class AnswerRead(ReadText):
    """What a model answers of a page that nothing can be looked up in."""

    def __init__(self, max_statements: int) -> None:
        super().__init__(max_statements)
        self.has_refused = False

    @property
    def has_enough(self) -> bool:
        return super().has_enough or self.has_refused

    def add(self, statement: Statement) -> None:
        if is_refusal(statement.text, is_supported=False):
            self.has_refused = True
        else:
            super().add(statement)

    def _says_something(self, statement: Statement) -> bool:
        return _is_answer(statement)


def _is_answer(statement: Statement) -> bool:
    """Whether it says anything at all, and does not only lead on to what follows: `Here is the answer:`."""
    return num_terms(statement.text) > 0 and not statement.text.endswith(":")
