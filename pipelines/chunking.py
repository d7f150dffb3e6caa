"""Pages -> parts that fit a token budget: consecutive pages together, a page that is too long in pieces."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mmserve.vision.image_source import ImageSource, PixelLimits


@dataclass(frozen=True)
class PagePicture:
    """A page as a picture, and the tokens that it takes within the limits."""

    source: ImageSource
    limits: PixelLimits
    num_tokens: int


@dataclass(frozen=True)
class PageText:
    """What a request gets of a page, or of a piece of one that was too long."""

    number: int
    text: str
    picture: PagePicture | None = None


@dataclass(frozen=True)
class Part:
    """What one request reads."""

    texts: tuple[PageText, ...]

    @property
    def has_pictures(self) -> bool:
        return any(text.picture is not None for text in self.texts)

    @property
    def first_page(self) -> int:
        return self.texts[0].number

    @property
    def last_page(self) -> int:
        return self.texts[-1].number

    @property
    def page_numbers(self) -> list[int]:
        return list(dict.fromkeys(text.number for text in self.texts))


class PartPacker:
    """Fills parts as pages come, so that a part can be asked about while later pages are still being read."""

    def __init__(self, budget: int, count_tokens: Callable[[PageText], int]) -> None:
        self._budget = budget
        self._count_tokens = count_tokens
        self._open: list[PageText] = []
        self._num_open_tokens = 0

    def push(self, page: PageText) -> list[Part]:
        """The parts that this page closes."""
        closed: list[Part] = []
        for piece, num_tokens in self._pieces(page):
            if self._open and self._num_open_tokens + num_tokens > self._budget:
                closed.append(self._close())
            self._open.append(piece)
            self._num_open_tokens += num_tokens
        return closed

    def finish(self) -> Part | None:
        return self._close() if self._open else None

    def _close(self) -> Part:
        part = Part(tuple(self._open))
        self._open, self._num_open_tokens = [], 0
        return part

    def _pieces(self, page: PageText) -> Iterator[tuple[PageText, int]]:
        num_tokens = self._count_tokens(page)
        if num_tokens <= self._budget or len(page.text) < 2:
            yield page, num_tokens
            return
        for half in _halves(page.text):
            yield from self._pieces(PageText(page.number, half))


def _halves(text: str) -> tuple[str, str]:
    """Two halves, cut at the line end, sentence end or space that is nearest to the middle."""
    middle = len(text) // 2
    for mark in ("\n", ". ", " "):
        before, after = text.rfind(mark, 1, middle), text.find(mark, middle, len(text) - len(mark))
        cuts = [cut for cut in (before, after) if len(text) // 4 <= cut]
        if cuts:
            cut = min(cuts, key=lambda place: abs(place - middle)) + len(mark)
            return text[:cut], text[cut:]
    return text[:middle], text[middle:]
