"""Text <-> token ids, on the `tokenizers` library directly: importing transformers would take seconds."""

import json
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import tokenizers

from mmserve.errors import RequestError
from mmserve.weights.chat_template import RenderedPiece, render_chat
from mmserve.weights.special_tokens import TextEncoder
from mmserve.weights.token_stream import DecodeStream, TokenBytes


class Tokenizer:
    """A model's tokenizer and chat template.

    `eos_token_ids` are the tokenizer's own; the model's configuration may know more.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        extra_eos_token_ids: Sequence[int] = (),
    ) -> None:
        """`special_tokens` are those that templates may name: `bos_token`, `eos_token`, ... -> their text."""
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._special_tokens = dict(special_tokens or {})
        added = backend.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        token_bytes = TokenBytes(backend, self._added)
        self._strips_leading_space = token_bytes.strips_leading_space
        self._bytes_of = cache(token_bytes)
        self.chat_template = chat_template
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = self._id_of("bos_token")
        eos = self._id_of("eos_token")
        self.eos_token_ids = tuple(dict.fromkeys([*([] if eos is None else [eos]), *extra_eos_token_ids]))

    def save(self, folder: Path) -> None:
        """As files that transformers, too, reads: `tokenizer.json`, its settings, and the chat template."""
        self._backend.save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **self._special_tokens}
        (folder / "tokenizer_config.json").write_text(
            json.dumps(settings, ensure_ascii=False, indent=2) + "\n", "utf-8"
        )
        if self.chat_template is not None:
            (folder / "chat_template.jinja").write_text(self.chat_template, "utf-8")

    def _id_of(self, special_name: str) -> int | None:
        content = self._special_tokens.get(special_name)
        return None if content is None else self._backend.token_to_id(content)

    def encode(self, text: str, *, add_special_tokens: bool = False, parse_special: bool = True) -> list[int]:
        """Ids of `text`. With `parse_special=False` the text `<|im_end|>` stays text and never becomes that token."""
        if parse_special:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return self._text_encoder.encode(text, add_special_tokens=add_special_tokens)

    @cached_property
    def _text_encoder(self) -> TextEncoder:
        return TextEncoder(self._backend, {token_id: self._added[token_id] for token_id in self.special_token_ids})

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """One token's raw bytes; empty for an id beyond the vocabulary."""
        return self._bytes_of(token_id)

    def token_text(self, token_id: int) -> str:
        """One token's text, with U+FFFD where it is half a character."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def decode_stream(self, *, skip_special_tokens: bool) -> DecodeStream:
        """A decoder for one answer: `step(id)` gives the text that became whole, `finish()` the rest."""
        return DecodeStream(
            self._bytes_of,
            skipped_ids=self.special_token_ids if skip_special_tokens else frozenset(),
            strips_leading_space=self._strips_leading_space,
        )

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **template_kwargs: Any
    ) -> list[int]:
        """Ids of the rendered chat; what messages spell is text, only the template writes control tokens.

        Raises `RequestError` (`invalid_request`) if there is no template or it refuses the messages.
        """
        if self.chat_template is None:
            raise RequestError("invalid_request", "this model has no chat template: use plain completions instead")
        variables: dict[str, Any] = {"tools": None, "documents": None, **self._special_tokens, **template_kwargs}
        variables["add_generation_prompt"] = add_generation_prompt
        pieces = render_chat(self.chat_template, messages, self._added.values(), variables)
        ids: list[int] = []
        for piece in pieces:
            ids += self._encode_continuation(piece) if ids else self._encode_piece(piece.text, piece)
        return ids

    def _encode_piece(self, text: str, piece: RenderedPiece) -> list[int]:
        return self.encode(text, parse_special=not piece.is_text)

    def _encode_continuation(self, piece: RenderedPiece) -> list[int]:
        # After a line break, so that sentencepiece does not put in the space that it puts at the start of a text.
        newline = self.encode("\n")
        ids = self._encode_piece("\n" + piece.text, piece)
        return ids[len(newline) :] if ids[: len(newline)] == newline else self._encode_piece(piece.text, piece)
