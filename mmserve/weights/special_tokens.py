"""Special tokens of a `tokenizers` tokenizer: sequence ends, and keeping text that spells one from becoming one."""

import re

import tokenizers
from tokenizers import processors


def set_sequence_ends(backend: tokenizers.Tokenizer, *, bos: str | None, eos: str | None) -> None:
    """Have `add_special_tokens=True` put these around a text; None, or a token that is not there, puts nothing."""
    ids = {token: backend.token_to_id(token) for token in (bos, eos) if token is not None}
    known = {token: token_id for token, token_id in ids.items() if token_id is not None}
    single = [*([bos] if bos in known else []), "$A", *([eos] if eos in known else [])]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=list(known.items()))


class TextEncoder:
    """Encodes text with the model and vocabulary of `backend` but without its added tokens: all of it is text."""

    def __init__(self, backend: tokenizers.Tokenizer, special_tokens: dict[int, str]) -> None:
        # Shares the vocabulary's memory with the original.
        self._plain = tokenizers.Tokenizer(backend.model)
        for part in ("normalizer", "pre_tokenizer", "post_processor"):
            if (component := getattr(backend, part)) is not None:
                setattr(self._plain, part, component)
        self._cuts = self._find_cuts(special_tokens)

    def _find_cuts(self, special_tokens: dict[int, str]) -> re.Pattern[str]:
        """Where to cut text so that no special token comes out of plain merging; most vocabularies need no cut."""
        forgeable = [
            token
            for token_id, token in special_tokens.items()
            if len(token) > 1 and token_id in [*self._ids(token), *self._ids("\n" + token)]
        ]
        middles = [f"(?<={re.escape(token[:1])})(?={re.escape(token[1:])})" for token in forgeable]
        return re.compile("|".join(middles) or "(?!)")

    def _ids(self, text: str) -> list[int]:
        return self._plain.encode(text, add_special_tokens=False).ids

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of `text`, none of which is a special token, save those that `add_special_tokens` puts around it."""
        first, *others = self._cuts.split(text)
        ids = self._plain.encode(first, add_special_tokens=add_special_tokens).ids
        for piece in others:
            ids += self._ids(piece)
        return ids
