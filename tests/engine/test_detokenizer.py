"""The detokeniser over a byte-level and a sentencepiece-like vocabulary, against the library's decoding in one go."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.engine.detokenizer import Detokenizer
from mmserve.request import SamplingParams
from mmserve.weights.tokenizer import Tokenizer

EMOJI = "🦊".encode()
PIECES = [
    *(bytes([byte]) for byte in b"abcSTOP .\n"),
    *(b"ab", b" ab", b"ST", b"OP!", b"aSTOPb", b"a\n\nb", "é".encode(), "漢".encode(), b"\xef\xbf\xbd"),
    *(EMOJI, EMOJI[:1], EMOJI[1:3], EMOJI[3:], b"x" + EMOJI[:2], EMOJI[2:] + b"S", b"\xe6", b"\xbc\xa2", b"\xff"),
]
END = len(PIECES)
TOOL = END + 1


def byte_level_name(piece: bytes) -> str:
    """The name of a byte string in GPT-2's alphabet, as a library component writes it."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return "".join(chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in piece)


def added_token(token_id: int, content: str, *, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, "special": special, **flags}


def make_tokenizer(vocab: dict[str, int], decoder: dict[str, Any], added: list[dict[str, Any]]) -> Tokenizer:
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    spec = {"version": "1.0", "added_tokens": added, "decoder": decoder, "model": model}
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(spec)))


BYTE_LEVEL = make_tokenizer(
    {byte_level_name(piece): token_id for token_id, piece in enumerate(PIECES)},
    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
    [added_token(END, "<|end|>", special=True), added_token(TOOL, "<tool>", special=False)],
)
SENTENCEPIECE = make_tokenizer(
    {"<s>": 0, "▁a": 1, "b": 2, "▁": 3, "▁▁": 4, "<0xC3>": 5, "<0xA9>": 6, "<0x20>": 7},
    {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    },
    [added_token(0, "<s>", special=True)],
)


def ids_of(*pieces: bytes) -> list[int]:
    return [PIECES.index(piece) for piece in pieces]


def stream(chunks: Sequence[Sequence[int]], tokenizer: Tokenizer = BYTE_LEVEL, **params: Any) -> list[str]:
    """What each push shows, and what the end adds."""
    detokenizer = Detokenizer(tokenizer, SamplingParams(**params))
    return [*(detokenizer.push(chunk) for chunk in chunks), detokenizer.finish()]


def stream_each(ids: Sequence[int], tokenizer: Tokenizer = BYTE_LEVEL, **params: Any) -> list[str]:
    return stream([[token_id] for token_id in ids], tokenizer, **params)


# Characters


def test_a_character_over_several_tokens_appears_whole() -> None:
    ids = ids_of(b"a", EMOJI[:1], EMOJI[1:3], EMOJI[3:], b"b")
    assert stream_each(ids) == ["a", "", "", "🦊", "b", ""]
    assert stream_each(ids_of(b"x" + EMOJI[:2], EMOJI[2:] + b"S")) == ["x", "🦊S", ""]


def test_half_a_character_at_the_end_is_dropped() -> None:
    assert stream_each(ids_of(b"a", EMOJI[:1], EMOJI[1:3])) == ["a", "", "", ""]


def test_bytes_that_are_no_character_are_replaced_and_do_not_hold_up_the_text() -> None:
    assert stream_each(ids_of(b"\xff", b"a", EMOJI[:1], b"b")) == ["\ufffd", "a", "", "\ufffdb", ""]


def test_special_tokens_are_skipped_or_shown() -> None:
    ids = [*ids_of(b"a"), END, TOOL, *ids_of(b"b")]
    assert stream_each(ids) == ["a", "", "<tool>", "b", ""]
    assert stream_each(ids, skip_special_tokens=False) == ["a", "<|end|>", "<tool>", "b", ""]


@pytest.mark.parametrize("ids", [[1, 2, 1], [3, 1], [4, 2], [0, 1, 2], [2, 1], [5, 6, 1], [7, 2], [3, 3, 2]])
def test_the_space_that_sentencepiece_puts_first_is_taken_off_once(ids: list[int]) -> None:
    backend_text = SENTENCEPIECE.decode(ids)
    assert "".join(stream_each(ids, SENTENCEPIECE)) == backend_text
    assert "".join(stream([ids], SENTENCEPIECE)) == backend_text


def test_a_byte_pair_of_sentencepiece_is_one_character() -> None:
    assert stream_each([1, 5, 6], SENTENCEPIECE) == ["a", "", "é", ""]


# Stop strings


def test_a_stop_string_over_tokens_never_leaks() -> None:
    ids = ids_of(b"a", b"ST", b"OP!", b"b")
    assert stream_each(ids, stop=("STOP",)) == ["a", "", "", "", ""]
    assert stream_each(ids, stop=("STOP",), include_stop_str_in_output=True) == ["a", "", "STOP", "", ""]


def test_a_stop_string_inside_one_token_cuts_it() -> None:
    assert stream_each(ids_of(b"b", b"aSTOPb", b"c"), stop=("STOP",)) == ["b", "a", "", ""]


def test_text_that_does_not_become_a_stop_string_is_released() -> None:
    assert stream_each(ids_of(b"ST", b"O", b"b", b"ST"), stop=("STOP",)) == ["", "", "STOb", "", "ST"]
    assert stream_each(ids_of(b"S", b"S", b"T", b"OP!"), stop=("STOP",)) == ["", "S", "", "", ""]


def test_only_the_text_that_may_become_a_stop_string_is_held() -> None:
    assert stream_each(ids_of(b"a", b"b", b"ab", b"a", b"c"), stop=("abac",)) == ["", "", "ab", "", "", ""]


def test_the_stop_string_that_is_complete_first_wins() -> None:
    ids = ids_of(b"a", b"ST", b"OP!", b".")
    for chunks in ([ids], [[token_id] for token_id in ids]):
        detokenizer = Detokenizer(BYTE_LEVEL, SamplingParams(stop=("STOP!.", "OP", "TOP", "!")))
        assert "".join([detokenizer.push(chunk) for chunk in chunks]) == "aS"
        assert detokenizer.stop_string == "TOP"


def test_what_follows_a_stop_string_is_neither_shown_nor_counted() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL, SamplingParams(stop=("\n\n",)))
    assert detokenizer.push(ids_of(b"ab", b"a\n\nb", b"c", b"c")) == "aba"
    assert (detokenizer.stop_string, detokenizer.num_tokens) == ("\n\n", 2)
    assert detokenizer.push(ids_of(b"c")) + detokenizer.finish() == ""
    assert detokenizer.num_tokens == 2


def test_no_stop_string_is_named_before_one_was_met() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL, SamplingParams(stop=("STOP",)))
    detokenizer.push(ids_of(b"ST", b"O"))
    assert detokenizer.finish() == "STO"
    assert (detokenizer.stop_string, detokenizer.finish()) == (None, "")


def test_a_stop_string_of_characters_in_pieces() -> None:
    ids = ids_of(b"a", EMOJI[:1], EMOJI[1:3], EMOJI[3:], b"\xe6", b"\xbc\xa2", b"b")
    assert stream_each(ids, stop=("🦊漢",)) == ["a", "", "", "", "", "", "", ""]
    assert "".join(stream_each(ids, stop=("🦊b",))) == "a🦊漢b"


def test_skipped_special_tokens_do_not_part_a_stop_string() -> None:
    ids = [*ids_of(b"ST"), END, *ids_of(b"OP!")]
    assert "".join(stream_each(ids, stop=("STOP",))) == ""
    assert "".join(stream_each(ids, stop=("STOP",), skip_special_tokens=False)) == "ST<|end|>OP!"


def test_stop_strings_count_only_after_min_tokens() -> None:
    ids = ids_of(b"aSTOPb", b"ST", b"OP!", b"aSTOPb")
    assert stream_each(ids, stop=("STOP",), min_tokens=1) == ["aSTOPb", "", "", "", ""]
    assert stream_each(ids, stop=("STOP",), min_tokens=2) == ["aSTOPb", "ST", "OP!", "a", ""]


# Any tokens, split in any way

TOKEN_IDS = st.lists(st.integers(0, TOOL), max_size=30)
STOPS = st.lists(
    st.sampled_from(["S", "STOP", "TOP", "OP!", "ab", "ab ab", "abab", "b🦊", "🦊", "\n\n", "\ufffd", "<tool>a", "a."]),
    max_size=4,
    unique=True,
).map(tuple)


def split(ids: list[int], cuts: list[int]) -> list[list[int]]:
    places = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[start:stop] for start, stop in itertools.pairwise(places)]


def decode_whole_characters(ids: list[int]) -> str:
    """The library's text in one go, without the U+FFFD of a character that the end cuts off."""
    raw = b"".join(b"." if token_id >= END else PIECES[token_id] for token_id in ids if token_id != END)
    return BYTE_LEVEL.decode(ids)[: -1 if ends_inside_a_character(raw) else None]


def ends_inside_a_character(raw: bytes) -> bool:
    for length in (1, 2, 3):
        try:
            raw[-length:].decode()
        except UnicodeDecodeError as error:
            if error.start == 0 and error.reason == "unexpected end of data" and len(raw) >= length:
                return True
    return False


def cut_at_first_stop(text: str, stops: tuple[str, ...], *, inclusive: bool) -> str:
    for end in range(1, len(text) + 1):
        here = [stop for stop in stops if text[:end].endswith(stop)]
        if here:
            return text[: end if inclusive else end - max(map(len, here))]
    return text


@settings(max_examples=400, deadline=None)
@given(ids=TOKEN_IDS, cuts=st.lists(st.integers(0, 30), max_size=8), stops=STOPS, inclusive=st.booleans())
def test_deltas_join_to_the_decoding_in_one_go(
    ids: list[int], cuts: list[int], stops: tuple[str, ...], inclusive: bool
) -> None:
    expected = cut_at_first_stop(decode_whole_characters(ids), stops, inclusive=inclusive)
    shown = stream(split(ids, cuts), stop=stops, include_stop_str_in_output=inclusive)
    assert "".join(shown) == expected


@settings(max_examples=200, deadline=None)
@given(ids=TOKEN_IDS, stops=STOPS)
def test_no_delta_has_to_be_taken_back_and_none_waits_without_need(ids: list[int], stops: tuple[str, ...]) -> None:
    shown = ""
    for count, delta in enumerate(stream_each(ids, stop=stops)[:-1], start=1):
        shown += delta
        text = decode_whole_characters(ids[:count])
        final = cut_at_first_stop(text, stops, inclusive=False)
        assert final.startswith(shown)
        held = final[len(shown) :]
        assert not held or any(stop.startswith(held) for stop in stops)
