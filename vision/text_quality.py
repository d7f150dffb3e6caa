"""Whether a text layer says what the page shows. A wrong character map gives confident mojibake, not an error."""

import itertools
import math
import re
import unicodedata
from collections import Counter

_WORDS = re.compile(r"[^\W\d_]{3,}")
_UTF8_READ_AS_LATIN = re.compile("[ÂÃÐÑâ][\u0080-\u00bf€‚ƒ„…†‡ˆ‰Š‹ŒŽ‘’“”•–—˜™š›œžŸ]")
_MIN_LETTERS = 8
_MIN_LETTERS_FOR_FREQUENCIES = 120
_CASED_SCRIPTS = frozenset(("LATIN", "CYRILLIC", "GREEK", "ARMENIAN"))
_MIN_LIKENESS = 0.72
_MIN_LIKENESS_OF_LITTLE = 0.65
# per cent, averaged over English, German, French, Spanish, Italian, Portuguese, Dutch and Polish prose
_LETTER_SHARES = (
    "a8.7 b1.4 c3.4 d4.3 e14 f1.2 g1.8 h2.1 i7.8 j.7 k1.2 l4.4 m2.8 n7.6 o6.6 p2.6 q.5 r6.4 s6.3 t6.4 u4.2 v1.4"
)
_LETTER_FREQUENCIES = {share[0]: float(share[1:]) for share in f"{_LETTER_SHARES} w1.2 x.3 y1.1 z1".split()}
# letters beyond a script's living alphabets: a page full of them was mapped wrongly
_RARE_LETTERS = re.compile(
    "[\u0180-\u01cc\u01f0-\u0217\u021c-\u02af\u0370-\u0377\u03cf-\u03ff\u0460-\u048f\u04c1-\u04cf\u04fa-\u052f"
    "\u1d00-\u1dbf\u2c60-\u2c7f\ua640-\ua69f\ua720-\ua7ff]"
)


def is_trustworthy(text: str) -> bool:
    """False where the statistics of `text` are those of a broken character map; little text is not judged."""
    counts = Counter(text)
    is_odd = _share_of_odd(counts) > 0.08 or _share_of_rare_letters(counts) > 0.15 or _share_of_odd_words(text) > 0.3
    return not is_odd and not _is_misdecoded(text, counts) and _reads_as_words(counts)


def is_doubtful(text: str) -> bool:
    """Whether there is too little text to be judged, and what there is reads unlike words: codes, or a wrong map."""
    bare = _bare_letters(Counter(text))
    is_little = _MIN_LETTERS <= bare.total() < _MIN_LETTERS_FOR_FREQUENCIES
    return is_little and _likeness_to_words(bare) < _MIN_LIKENESS_OF_LITTLE


def _share_of_odd(counts: Counter[str]) -> float:
    """Private use, unassigned, control, surrogate and replacement characters, of those that are not space."""
    visible = sum(count for c, count in counts.items() if not c.isspace())
    odd = sum(count for c, count in counts.items() if not c.isspace() and _is_odd(c))
    return odd / visible if visible else 0.0


def _is_odd(character: str) -> bool:
    return character == "\ufffd" or unicodedata.category(character) in ("Co", "Cn", "Cc", "Cs")


def _share_of_rare_letters(counts: Counter[str]) -> float:
    letters = _num_letters(counts)
    rare = sum(count for c, count in counts.items() if _RARE_LETTERS.match(c))
    return rare / letters if letters >= _MIN_LETTERS else 0.0


def _share_of_odd_words(text: str) -> float:
    """Words that mix alphabets, or capitals after small letters, as no language does throughout."""
    words = _WORDS.findall(text)
    return sum(_is_odd_word(word) for word in words) / len(words) if len(words) >= _MIN_LETTERS else 0.0


def _is_odd_word(word: str) -> bool:
    if not word.isascii() and len({unicodedata.name(c, "?").split(" ")[0] for c in word} & _CASED_SCRIPTS) > 1:
        return True
    if word[1:].islower() or word.isupper():
        return False
    return sum(a.islower() and b.isupper() for a, b in itertools.pairwise(word)) >= 2


def _is_misdecoded(text: str, counts: Counter[str]) -> bool:
    """UTF-8 or another alphabet's bytes, read as Latin-1: many accents, in pairs or nearly alone."""
    if text.isascii():
        return False
    letters = _num_letters(counts)
    accented = sum(count for c, count in counts.items() if "\u00c0" <= c <= "\u00ff")
    pairs = len(_UTF8_READ_AS_LATIN.findall(text))
    return pairs >= max(3, 0.02 * letters) or (letters >= _MIN_LETTERS and accented > 0.5 * letters)


def _reads_as_words(counts: Counter[str]) -> bool:
    """A map shifted by a few places keeps letters and spaces; only their frequencies tell (not for lists of codes)."""
    bare = _bare_letters(counts)
    num_alphanumeric = sum(count for c, count in counts.items() if c.isalnum())
    if bare.total() < _MIN_LETTERS_FOR_FREQUENCIES or bare.total() < 0.5 * num_alphanumeric:
        return True
    return _likeness_to_words(bare) >= _MIN_LIKENESS


def _bare_letters(counts: Counter[str]) -> Counter[str]:
    """Latin letters in lower case, without their accents."""
    bare: Counter[str] = Counter()
    for character, count in counts.items():
        letter = unicodedata.normalize("NFD", character.lower())[:1]
        if letter in _LETTER_FREQUENCIES:
            bare[letter] += count
    return bare


def _likeness_to_words(bare: Counter[str]) -> float:
    dot = sum(bare[letter] * share for letter, share in _LETTER_FREQUENCIES.items())
    return dot / (math.hypot(*bare.values()) * math.hypot(*_LETTER_FREQUENCIES.values()))


def _num_letters(counts: Counter[str]) -> int:
    return sum(count for c, count in counts.items() if c.isalpha())
