"""Token ids of one answer -> text that may be shown: whole characters, and no piece of a stop string."""

from collections.abc import Sequence

from mmserve.request import SamplingParams
from mmserve.weights.tokenizer import Tokenizer


class Detokenizer:
    """The text does not depend on how the ids are split over calls: the stop string that is complete first cuts it.

    Text that may still become a stop string is held back. Text of the first `min_tokens` tokens is not searched.
    `stop_string` is the one that was met, `num_tokens` counts the ids up to the one that completed it.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self.stop_string: str | None = None
        self.num_tokens = 0
        self._stream = tokenizer.decode_stream(skip_special_tokens=params.skip_special_tokens)
        self._stops = params.stop
        self._min_tokens = params.min_tokens
        self._includes_stop = params.include_stop_str_in_output
        self._held = ""

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that is safe to show now; "" once a stop string was met."""
        if not self._stops:
            self.num_tokens += len(token_ids)
            return self._stream.push(token_ids)
        shown: list[str] = []
        for token_id in token_ids:
            if self.stop_string is not None:
                break
            self.num_tokens += 1
            text = self._stream.step(token_id) or ""
            shown.append(self._release(text) if self.num_tokens > self._min_tokens else text)
        return "".join(shown)

    def finish(self) -> str:
        """The text held back, which did not become a stop string; half a character at the end is dropped."""
        held, self._held = self._held, ""
        return held

    def _release(self, new_text: str) -> str:
        text, self._held = self._held + new_text, ""
        if found := _first_complete(text, self._stops):
            end, start, self.stop_string = found
            return text[: end if self._includes_stop else start]
        safe = min(_start_of_partial(text, stop) for stop in self._stops)
        self._held = text[safe:]
        return text[:safe]


def _first_complete(text: str, stops: Sequence[str]) -> tuple[int, int, str] | None:
    """(end, start, stop string) of the one that ends first in `text`; the longest of those that end there."""
    found = ((start + len(stop), start, stop) for stop in stops if (start := text.find(stop)) != -1)
    return min(found, default=None)


def _start_of_partial(text: str, stop: str) -> int:
    """Where the longest end of `text` begins that `stop` begins with; the length of `text` if there is none."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start != -1 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return len(text) if start == -1 else start
