"""Token ids -> bytes -> text: what a token stands for, and streaming that never shows half a character."""

import codecs
import re
from collections.abc import Callable, Mapping, Sequence

import tokenizers

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_METASPACE = "\u2581"


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes: character -> byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + position): byte for position, byte in enumerate(others)}


_ALPHABET = byte_level_alphabet()


class TokenBytes:
    """The bytes of each token of one tokenizer, by the kind of its decoder: byte-level, byte fallback, or plain."""

    def __init__(self, backend: tokenizers.Tokenizer, added: Mapping[int, str]) -> None:
        self._backend = backend
        self._added = added
        decoder = _state(backend.decoder)
        self._of_piece = _byte_level if '"ByteLevel"' in decoder else _sentencepiece
        is_metaspace = '"Metaspace"' in decoder and '"prepend_scheme":"never"' not in decoder
        self.strips_leading_space = is_metaspace or '"Strip"' in decoder

    def __call__(self, token_id: int) -> bytes:
        """Empty for an id that the tokenizer does not have (models pad their vocabulary)."""
        if token_id in self._added:
            return self._added[token_id].encode()
        piece = self._backend.id_to_token(token_id)
        return b"" if piece is None else self._of_piece(piece)


def _state(component: object) -> str:
    return "" if component is None else component.__getstate__().decode()  # type: ignore[attr-defined]


def _byte_level(piece: str) -> bytes:
    try:
        return bytes(_ALPHABET[character] for character in piece)
    except KeyError:
        return piece.encode()


def _sentencepiece(piece: str) -> bytes:
    if byte := _BYTE_FALLBACK.fullmatch(piece):
        return bytes([int(byte[1], 16)])
    return piece.replace(_METASPACE, " ").encode()


class DecodeStream:
    """Ids as they come -> text as soon as it is whole characters; bytes that can never be UTF-8 become U+FFFD."""

    def __init__(
        self, token_bytes: Callable[[int], bytes], *, skipped_ids: frozenset[int], strips_leading_space: bool
    ) -> None:
        self._token_bytes = token_bytes
        self._skipped_ids = skipped_ids
        self._strip_next = strips_leading_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_inside_character = False

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that these tokens complete."""
        skipped, token_bytes = self._skipped_ids, self._token_bytes
        data = b"".join([token_bytes(token_id) for token_id in token_ids if token_id not in skipped])
        return self._without_first_space(self._decode(data))

    def step(self, token_id: int) -> str | None:
        """Text that this token completes, or None."""
        if token_id in self._skipped_ids:
            return None
        return self._without_first_space(self._decode(self._token_bytes(token_id))) or None

    def finish(self) -> str:
        """U+FFFD if the stream ended inside a character, else nothing."""
        return self._utf8.decode(b"", final=True)

    def _decode(self, data: bytes) -> str:
        # Most tokens are ASCII, which needs no incremental decoder.
        if data.isascii() and not self._is_inside_character:
            return data.decode("ascii")
        text = self._utf8.decode(data)
        self._is_inside_character = bool(self._utf8.getstate()[0])
        return text

    def _without_first_space(self, text: str) -> str:
        if text and self._strip_next:
            self._strip_next = False
            return text.removeprefix(" ")
        return text
