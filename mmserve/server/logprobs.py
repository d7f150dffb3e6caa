"""Log-probabilities in the two forms that OpenAI's interface has: one for chats, one for text completions."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mmserve.request import TokenLogprob
from mmserve.server.schemas.chat import ChatLogprobs, ChatTokenLogprob, TopLogprob
from mmserve.server.schemas.completions import CompletionLogprobs

if TYPE_CHECKING:
    from mmserve.weights.tokenizer import Tokenizer

# JSON has no minus infinity; OpenAI's own interface writes this number for it.
LOWEST_LOGPROB = -9999.0


def chat_logprobs(tokenizer: "Tokenizer", logprobs: Sequence[TokenLogprob]) -> ChatLogprobs:
    return ChatLogprobs(content=[_chat_token(tokenizer, logprob) for logprob in logprobs])


def _chat_token(tokenizer: "Tokenizer", sampled: TokenLogprob) -> ChatTokenLogprob:
    own = _top(tokenizer, sampled.token_id, sampled.logprob)
    alternatives = [_top(tokenizer, token_id, logprob) for token_id, logprob in sampled.top]
    return ChatTokenLogprob(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=alternatives)


def _top(tokenizer: "Tokenizer", token_id: int, logprob: float) -> TopLogprob:
    return TopLogprob(
        token=tokenizer.token_text(token_id),
        logprob=max(logprob, LOWEST_LOGPROB),
        bytes=list(tokenizer.token_bytes(token_id)),
    )


class CompletionLogprobsWriter:
    """Keeps the text offset of one choice from chunk to chunk."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def write(self, logprobs: Sequence[TokenLogprob]) -> CompletionLogprobs:
        tokens = [self._tokenizer.token_text(logprob.token_id) for logprob in logprobs]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return CompletionLogprobs(
            tokens=tokens,
            token_logprobs=[max(logprob.logprob, LOWEST_LOGPROB) for logprob in logprobs],
            top_logprobs=[self._alternatives(logprob) for logprob in logprobs],
            text_offset=offsets,
        )

    def _alternatives(self, sampled: TokenLogprob) -> dict[str, float]:
        """The best tokens and the sampled one; of two tokens of one text the likelier stays."""
        alternatives: dict[str, float] = {}
        for token_id, logprob in (*sampled.top, (sampled.token_id, sampled.logprob)):
            alternatives.setdefault(self._tokenizer.token_text(token_id), max(logprob, LOWEST_LOGPROB))
        return alternatives
